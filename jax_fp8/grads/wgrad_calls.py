"""Which weight gradients can be computed later, read from a traced loss and its traced backward pass.

    jaxpr of the loss      ─origins→     which param is the kernel of a GEMM, as it is
    jaxpr of its gradient  ─call_counts→ how often a GEMM keeps operands

A GEMM is left out, and computes its gradient in the pass, where its operands do not say all: where its kernel is
computed from a param rather than being one, or where its gradient is a sum over devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_fp8.core.deferral import FoundOperands, call_mark
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recorder import kernel_mark
from jax_fp8.jaxprs.named_values import Origin, Origins, call_counts
from jax_fp8.kernels.vma import varying_axes, varying_in


@dataclass(frozen=True)
class WeightProduct:
    """Calls of a GEMM whose operands look alike, and what becomes of their products.

    Args:
      operands: of one call.
      params: the numbers of its kernels among the leaves of the params.
      widths: columns of each.
      stacked: leading dims of the kernels; () unless the layer is scanned over.
      slots: layers that leave operands side by side; None where the layer is not one of several.
      calls: of each layer; 0 if the program has none after all.
    """

    operands: FoundOperands
    params: tuple[int, ...]
    widths: tuple[int, ...]
    stacked: tuple[int, ...]
    slots: int | None
    calls: int

    @property
    def leading(self) -> tuple[int, ...]:
        """Dims of what is kept before those of one call: layers, calls."""
        layers = () if self.slots is None else (self.slots,)
        return layers + ((self.calls,) if self.calls > 1 else ())


def weight_products(
    found: Sequence[FoundOperands],
    kernels: Origins,
    gradient: Any,
    params: Sequence[Any],
    gemms: Mapping[LayerPath, tuple[int, ...]],
) -> list[WeightProduct]:
    """The products of the GEMMs of which all is known; with no calls those that were traced and are not in the program.

    Args:
      found: in the trace that made `gradient`.
      kernels: in the loss, which of `params` each marked kernel is.
      gradient: a jaxpr.
      params: leaves.
      gemms: in the order of their numbers, and the dims of stacked layers that share a state.
    """
    counts, paths = call_counts(gradient), [*gemms]
    products: list[WeightProduct] = []
    unknown = set()
    for number, operands in enumerate(found):
        path = paths[operands.gemm]
        of_kernels = _kernels_of(path, kernels)
        layers = math.prod(gemms[path]) if gemms[path] and operands.has_slot else None
        product = of_kernels and _product(operands, of_kernels, params, layers, counts[call_mark(number)])
        if not isinstance(product, WeightProduct):
            unknown.add(operands.gemm)
        else:
            products.append(product)
    return [product for product in products if product.operands.gemm not in unknown]


def _product(operands, of_kernels, params, layers, count) -> WeightProduct | None:
    """What so many calls make, if that is a gradient of these params."""
    calls_each, left_over = divmod(count, layers or 1)
    leaves = [params[of.argument] for of in of_kernels]
    stacked, widths = leaves[0].shape[:-2], tuple(leaf.shape[-1] for leaf in leaves)
    (k, _), (n, _) = operands.types[0].shape, operands.types[2].shape
    is_split = any(axes is not None for of in operands.types for axes in of.sharding.spec)  # on an Explicit mesh
    is_known = (
        math.isfinite(count)
        and not left_over
        and sum(widths) == n
        and all(leaf.shape == (*stacked, k, width) for leaf, width in zip(leaves, widths, strict=True))
        and all(of.depth == len(stacked) for of in of_kernels)  # each call has the kernel of one layer, whole
        and (not stacked or layers == math.prod(stacked))
        and not (is_split and (layers or calls_each > 1))  # jax writes to no element of a Ref that is split
        and varying_in(operands.types) <= varying_axes(leaves)  # else the gradient is a sum over devices
    )
    if not is_known:
        return None
    return WeightProduct(operands, tuple(of.argument for of in of_kernels), widths, stacked, layers, int(calls_each))


def _kernels_of(gemm: LayerPath, origins: Origins) -> list[Origin] | None:
    """The params that are its kernels, side by side; None unless each is one, and the same wherever the GEMM is."""
    found: list[Origin] = []
    while (mark := kernel_mark(gemm, len(found))) in origins:
        if len(origins[mark]) > 1 or None in origins[mark]:
            return None
        found += [origin for origin in origins[mark] if origin is not None]
    return found or None
