"""Which weight gradients can be computed later, read from a traced loss and its traced backward pass.

    jaxpr of the loss      ─origins→ which param is the kernel of a GEMM, as it is
    jaxpr of its gradient  ─calls→   how often a GEMM keeps operands

A GEMM is left out, and computes its gradient in the pass, where its operands do not say all: where its kernel is
computed from a param rather than being one, or where its gradient is a sum over devices.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax_fp8.core.deferral import FoundOperands, call_mark, kernel_mark
from jax_fp8.kernels.varying import varying_axes, varying_in

# Primitives that hand what they take to one jaxpr, in order, and its results back.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
UNCHANGED = ("name", "sharding_constraint")


@dataclass(frozen=True)
class Origin:
    """Which of the params a value is; or, after `depth` scans over leading dims, an element of it."""

    param: int
    depth: int = 0


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


Origins = dict[str, set[Origin | None]]


def origins(jaxpr: Any, given: Sequence[Origin | None], unchanged: Collection[str] = UNCHANGED) -> Origins:
    """What carries a name in a jaxpr: each param that it is, or None for anything else.

    Args:
      given: of the jaxpr's arguments.
      unchanged: primitives whose result is what they take.
    """
    found: Origins = defaultdict(set)
    _walk(jaxpr, given, found, unchanged)
    return found


def _walk(jaxpr, given, found: Origins, unchanged) -> list[Origin | None]:
    """The origins of the results."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def origin_of(atom):
        return None if hasattr(atom, "val") else known.get(atom)

    for equation in jaxpr.eqns:
        taken = [origin_of(atom) for atom in equation.invars]
        name, inner = equation.primitive.name, _inner_jaxprs(equation)
        results: Sequence[Origin | None] = [None] * len(equation.outvars)
        if name in unchanged:
            results = taken[:1]
        elif name in _CALLS and len(inner) == 1:
            results = _walk(inner[0], taken, found, unchanged)
        elif name == "scan":
            _walk(inner[0], _in_a_turn(equation, inner[0], taken), found, unchanged)
        elif name == "cond":
            for branch in inner:
                _walk(branch, taken[1:], found, unchanged)
        else:
            for unknown in inner:
                _walk(unknown, [None] * len(unknown.invars), found, unchanged)
        if name == "name":
            found[equation.params["name"]].add(taken[0])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [origin_of(atom) for atom in jaxpr.outvars]


def _in_a_turn(equation, body, taken) -> list[Origin | None]:
    """What the body of a scan is given: what all turns share, what they hand on, and the elements of stacks; which are
    how many, is said by the shapes of the results and of the arguments.
    """
    handed_on = sum(a.aval.shape == b.aval.shape for a, b in zip(equation.outvars, body.outvars, strict=True))
    stacks = sum(a.aval.shape != b.aval.shape for a, b in zip(equation.invars, body.invars, strict=True))
    shared = len(taken) - handed_on - stacks
    elements = taken[len(taken) - stacks :]
    inner = [of and Origin(of.param, of.depth + 1) for of in elements]
    return [*taken[:shared], *[None] * handed_on, *inner]


def _inner_jaxprs(equation) -> list[Any]:
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    opened = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in opened if hasattr(jaxpr, "eqns")]


def calls(jaxpr: Any, times: float = 1) -> Counter[str]:
    """How often one call of a jaxpr comes by each name; infinitely often in a loop of unknown length."""
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "name":
            counts[equation.params["name"]] += times  # type: ignore[assignment]
        turns = equation.params["length"] if name == "scan" else math.inf if name == "while" else 1
        for inner in _inner_jaxprs(equation):
            for mark, count in calls(inner, times * turns).items():
                counts[mark] += count
    return counts


def weight_products(
    found: Sequence[FoundOperands], loss: Any, gradient: Any, params: Sequence[Any], slots: Sequence[int | None]
) -> list[WeightProduct]:
    """The products of the GEMMs of which all is known; with no calls those that were traced and are not in the program.

    Args:
      found: in the trace that made `gradient`.
      loss, gradient: jaxprs; the arguments of `loss` are `params`.
      params: leaves.
      slots: of each GEMM, the number of layers that share its state; None for one.
    """
    kernels, counts = origins(loss, [Origin(i) for i in range(len(params))]), calls(gradient)
    products: list[WeightProduct] = []
    unknown = set()
    for number, operands in enumerate(found):
        of_kernels = _kernels_of(operands.gemm, kernels)
        layers = slots[operands.gemm] if operands.has_slot else None
        product = of_kernels and _product(operands, of_kernels, params, layers, counts[call_mark(number)])
        if not isinstance(product, WeightProduct):
            unknown.add(operands.gemm)
        else:
            products.append(product)
    return [product for product in products if product.operands.gemm not in unknown]


def _product(operands, of_kernels, params, layers, count) -> WeightProduct | None:
    """What so many calls make, if that is a gradient of these params."""
    calls_each, left_over = divmod(count, layers or 1)
    leaves = [params[of.param] for of in of_kernels]
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
    return WeightProduct(operands, tuple(of.param for of in of_kernels), widths, stacked, layers, int(calls_each))


def _kernels_of(gemm: int, origins: Origins) -> list[Origin] | None:
    """The params that are its kernels, side by side; None unless each is one, and the same wherever the GEMM is."""
    found: list[Origin] = []
    while (mark := kernel_mark(gemm, len(found))) in origins:
        if len(origins[mark]) > 1 or None in origins[mark]:
            return None
        found += [origin for origin in origins[mark] if origin is not None]
    return found or None
