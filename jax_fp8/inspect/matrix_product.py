"""One matrix product as `explain` lists it, and equal products as one row of its table.

Products that differ only in the number of their layer are one row, `layer_{0..23}/mlp/up/fprop`, with the sum of their
counts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MatrixProduct:
    """One matrix product (m, k) · (k, n), executed `count` times per call.

    `target` is the custom call, "reference" where kernels do not run, or "xla". `by_design` is True for a product in
    FP8, or in a higher precision by choice; False for one that was left out of FP8.
    """

    layer: str
    m: int
    n: int
    k: int
    dtype: str
    target: str
    count: int
    is_fp8: bool
    by_design: bool
    reason: str

    @property
    def shape(self) -> str:
        return f"({self.m}, {self.k}) · ({self.k}, {self.n})"

    def __str__(self):
        mark = "FP8" if self.is_fp8 else "   "
        return f"{mark} x{self.count} {self.shape} {self.dtype} by {self.target}, {self.layer}: {self.reason}"


_NUMBER = re.compile(r"(?<=_)\d+(?=[/)]|$)")  # that a layer's name ends with


def kinds(products: Iterable[MatrixProduct]) -> list[MatrixProduct]:
    """The products, where equal ones and those that differ only in the number of their layer are one:
    `layer_{0..23}/mlp/up`. A path may have several numbers; each position is merged in turn.
    """
    counts: dict[MatrixProduct, int] = {}
    for product in products:
        same = replace(product, count=0)
        counts[same] = counts.get(same, 0) + product.count
    rows = [(_numbers(same.layer), replace(same, count=count)) for same, count in counts.items()]
    for position in range(max((len(numbers) for numbers, _ in rows), default=0)):
        rows = _merged(rows, position)
    return [replace(row, layer=_with_numbers(row.layer, numbers)) for numbers, row in rows]


Numbers = tuple[frozenset[int], ...]  # at each position of a path that has a number: the numbers of its layers


def _numbers(layer: str) -> Numbers:
    return tuple(frozenset([int(number)]) for number in _NUMBER.findall(layer))


def _merged(rows: Iterable[tuple[Numbers, MatrixProduct]], position: int) -> list[tuple[Numbers, MatrixProduct]]:
    """The rows, where those that differ only in the number at this position of their path are one."""
    groups: dict[tuple, list[tuple[Numbers, MatrixProduct]]] = {}
    for numbers, row in rows:
        others = (*numbers[:position], *numbers[position + 1 :])
        key = others, len(numbers), replace(row, layer=_NUMBER.sub("#", row.layer))
        groups.setdefault(key, []).append((numbers, row))
    merged = []
    for group in groups.values():
        numbers, row = group[0]
        if len(numbers) > position:
            united = frozenset().union(*(each[position] for each, _ in group))
            numbers = (*numbers[:position], united, *numbers[position + 1 :])
        merged.append((numbers, replace(row, count=sum(each.count for _, each in group))))
    return merged


def _with_numbers(layer: str, numbers: Numbers) -> str:
    spans = iter(numbers)
    return _NUMBER.sub(lambda _: _span(sorted(next(spans))), layer)


def _span(numbers: list[int]) -> str:
    """3, {0..23}, or {0,2,4}."""
    if len(numbers) == 1:
        return str(numbers[0])
    whole = numbers[-1] - numbers[0] + 1 == len(numbers)
    return "{" + (f"{numbers[0]}..{numbers[-1]}" if whole else ",".join(map(str, numbers))) + "}"
