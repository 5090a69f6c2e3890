"""Which weight gradients can be delayed, read from a traced loss and its traced backward pass.

    jaxpr of the loss      ─origins→     which param each kernel of a GEMM is
    jaxpr of its gradient  ─call_counts→ how often a GEMM keeps operands

A GEMM is left out, and computes its gradient in the pass, where its operands alone do not give the gradient of a param:
where its kernel is computed from a param, or where the gradient is a sum over devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import Jaxpr

from jax_fp8.core.deferral import FoundOperands, call_mark
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recorder import kernel_mark
from jax_fp8.jaxprs.named_values import Origin, Origins, call_counts
from jax_fp8.kernels.vma import varying_axes, varying_in


@dataclass(frozen=True)
class WeightProduct:
    """Calls of a GEMM whose operands have the same types, and the params whose gradients they give.

    Args:
      operands: the operands of one call.
      params: the numbers of the GEMM's kernels among the leaves of the params.
      widths: the columns of each kernel.
      stacked: leading dims of the kernels; () unless the layer is scanned over.
      slots: the number of stacked layers, whose operands have a leading dim; None where layers are not stacked.
      calls: the number of calls of each layer; 0 if the backward pass has none after all.
    """

    operands: FoundOperands
    params: tuple[int, ...]
    widths: tuple[int, ...]
    stacked: tuple[int, ...]
    slots: int | None
    calls: int

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading dims of the kept operands: layers, calls."""
        layers = () if self.slots is None else (self.slots,)
        return layers + ((self.calls,) if self.calls > 1 else ())


def weight_products(
    found: Sequence[FoundOperands],
    kernels: Origins,
    gradient: Jaxpr,
    params: Sequence[jax.Array],
    gemms: Mapping[LayerPath, tuple[int, ...]],
) -> list[WeightProduct]:
    """The products of the GEMMs that can be delayed. A product has 0 calls if it was traced and is not in the program.

    Args:
      found: the operands that the trace of `gradient` has found.
      kernels: by mark, which of `params` each kernel in the loss is.
      gradient: the jaxpr of the loss's gradient.
      params: the leaves of the params.
      gemms: in the order of their numbers, with the dims along which layers that share a state are stacked.
    """
    counts, paths = call_counts(gradient), [*gemms]
    products: list[WeightProduct] = []
    not_delayed = set()
    for number, operands in enumerate(found):
        path = paths[operands.gemm]
        own_kernels = _kernels_of(path, kernels)
        layers = math.prod(gemms[path]) if gemms[path] and operands.has_slot else None
        product = own_kernels and _product(operands, own_kernels, params, layers, counts[call_mark(number)])
        if not isinstance(product, WeightProduct):
            not_delayed.add(operands.gemm)
        else:
            products.append(product)
    return [product for product in products if product.operands.gemm not in not_delayed]


def _product(
    operands: FoundOperands, kernels: Sequence[Origin], params: Sequence[jax.Array], layers: int | None, count: float
) -> WeightProduct | None:
    """The product of `count` calls, or None if it is not the gradient of the params that are these kernels."""
    calls_each, left_over = divmod(count, layers or 1)
    leaves = [params[kernel.argument] for kernel in kernels]
    stacked, widths = leaves[0].shape[:-2], tuple(leaf.shape[-1] for leaf in leaves)
    (k, _), (n, _) = operands.types[0].shape, operands.types[2].shape
    is_split = any(axes is not None for each in operands.types for axes in each.sharding.spec)  # on an Explicit mesh
    can_be_delayed = (
        math.isfinite(count)
        and not left_over
        and sum(widths) == n
        and all(leaf.shape == (*stacked, k, width) for leaf, width in zip(leaves, widths, strict=True))
        and all(kernel.depth == len(stacked) for kernel in kernels)  # each call has the whole kernel of one layer
        and (not stacked or layers == math.prod(stacked))
        and not (is_split and (layers or calls_each > 1))  # jax cannot write to one element of a Ref that is split
        and varying_in(operands.types) <= varying_axes(leaves)  # else the gradient is a sum over devices
    )
    if not can_be_delayed:
        return None
    arguments = tuple(kernel.argument for kernel in kernels)
    return WeightProduct(operands, arguments, widths, stacked, layers, int(calls_each))


def _kernels_of(gemm: LayerPath, origins: Origins) -> list[Origin] | None:
    """The params that are the kernels of a GEMM, from left to right. None if a kernel is not a param, or another param
    at another use of the GEMM.
    """
    kernels: list[Origin] = []
    while (mark := kernel_mark(gemm, len(kernels))) in origins:
        if len(origins[mark]) > 1 or None in origins[mark]:
            return None
        kernels += [origin for origin in origins[mark] if origin is not None]
    return kernels or None
