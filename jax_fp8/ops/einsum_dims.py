"""Which dims of an einsum of an input and a kernel are rows, contracted dims and columns of one product of matrices.

"BTD,NDH->BTNH"    rows B T, contracted D, columns N H      x as (B, T, D) · kernel as (D, N H)
"ECD,EDH->ECH"     a product for each E: rows C, contracted D, columns H
"""

from collections.abc import Sequence
from dataclasses import dataclass

Label = str | int  # a letter, or the number of a dim that "..." stands for


@dataclass(frozen=True)
class EinsumDims:
    """An einsum as a product of matrices.

    Args:
      text: the einsum, "input,kernel->result".
      input: labels of the input, "..." as one.
      kernel: labels of the kernel.
      batch: labels of all three arrays, in the order of the kernel: there is a product for each.
      contracted: labels of the kernel that are contracted, in its order.
      columns: the others, in the order in which the result has them.
      result: labels of the result, "..." as one.
    """

    text: str
    input: tuple[Label, ...]
    kernel: tuple[Label, ...]
    batch: tuple[Label, ...]
    contracted: tuple[Label, ...]
    columns: tuple[Label, ...]
    result: tuple[Label, ...]

    @classmethod
    def parse(cls, text: str, *, batched: bool = False) -> "EinsumDims":
        """Read an einsum.

        Args:
          batched: take one with a product for each label that is in all three arrays.

        Raises:
          ValueError: if it is no product of an input and a kernel as matrices, with the reason in a few words.
        """
        text = text.replace(" ", "")
        operands, arrow, result = text.partition("->")
        if not arrow or operands.count(",") != 1:
            raise ValueError(f'its einsum must be "input,kernel->result", and is "{text}"')
        of_input, of_kernel, of_result = (_labels(part) for part in (*operands.split(","), result))
        for labels in (of_input, of_kernel, of_result):
            if len(set(labels)) < len(labels):
                raise ValueError(f'a label is twice in one array of its einsum "{text}"')
        if "..." in of_kernel:
            raise ValueError(f'its kernel has "..." in its einsum "{text}"')
        batch = tuple(label for label in of_kernel if label in of_input and label in of_result)
        if batch and not batched:
            raise ValueError(f'its einsum "{text}" has a product for each {" and ".join(map(str, batch))}')
        unknown = {*of_input, *of_kernel} ^ {*of_result}
        contracted = tuple(label for label in of_kernel if label in of_input and label not in of_result)
        if not contracted or unknown != set(contracted):
            raise ValueError(f'its einsum "{text}" sums over other labels than those of input and kernel')
        columns = tuple(label for label in of_result if label in of_kernel and label not in batch)
        return cls(text, of_input, of_kernel, batch, contracted, columns, of_result)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the kernel as a matrix, or one for each product: those that are contracted, then the columns."""
        return tuple(self.kernel.index(label) for label in (*self.batch, *self.contracted, *self.columns))

    def of_input(self, ndim: int) -> tuple[list[int], list[int], list[int]]:
        """For an input of so many dims: its rows, with those of a product each first, and its contracted dims, and the
        dims of rows and columns that become those of the result.

        Raises:
          ValueError: if the einsum has another number of dims.
        """
        own, result = (_expanded(labels, ndim - len(self.input) + 1) for labels in (self.input, self.result))
        if len(own) != ndim:
            raise ValueError(f"needs {len(self.input)} dims")
        rows = [*self.batch, *(label for label in own if label not in (*self.batch, *self.contracted))]
        found = [*rows, *self.columns]
        contracted = [own.index(label) for label in self.contracted]
        return [own.index(label) for label in rows], contracted, [found.index(label) for label in result]


def _labels(part: str) -> tuple[Label, ...]:
    before, dots, after = part.partition("...")
    return (*before, *((dots,) if dots else ()), *after)


def _expanded(labels: Sequence[Label], dots: int) -> list[Label]:
    """The labels with numbers in place of "..."."""
    return [each for label in labels for each in (range(max(dots, 0)) if label == "..." else (label,))]
