"""What a loss says when it is traced, once for each shape of what it takes; nothing is computed.

    loss ─jaxpr→ LossTrace: which GEMMs are in FP8 by which recipe, and which find their weights in a cache
                            how params may be split over devices
                            which kernels the loss changes before an FP8 layer reads them

A step asks all of this before its first call. A warm pass traces the loss anyhow: `reporting` reads the same from
that trace, so that the loss is not called for it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import kernel_mark, listing
from jax_fp8.core.shards import ParamSharding, declared_shardings
from jax_fp8.grads.checks import ALONE, ALONE_OR_PAIR, check_loss
from jax_fp8.jaxprs.named_values import UNCHANGED, Origin, origins

# A gradient passes a cast, and another shape of the same elements, as it is.
AS_IT_IS = (*UNCHANGED, "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclass(frozen=True)
class LossTrace:
    """What a loss says of its layers.

    Args:
      declared: by param, how it may be split.
      gemms: in FP8, in program order, and their recipes.
      cached: those that have found their weights in the collection "fp8_cache".
      changed: kernels of these GEMMs that are not params as they are, but what the loss has made of them.
      out: shapes of what it returns.
    """

    declared: Mapping[LayerPath, ParamSharding]
    gemms: Mapping[LayerPath, Recipe]
    cached: tuple[LayerPath, ...] = ()
    changed: tuple[LayerPath, ...] = ()
    out: Any = field(default=None, compare=False)

    @classmethod
    def from_function(cls, function: Callable, *args: Any) -> "LossTrace":
        """Of a function of variables, or of `model.init`, with arrays or their shapes."""
        return traced(function, *shapes_of(args))[1]

    def gemms_of(self, places: Mapping[LayerPath, Any], fp8_state: Mapping) -> dict[LayerPath, Recipe]:
        """The GEMMs whose kernels are among the params by this path, and their scales in the state: a loss may apply a
        model to a part of the variables, and then its layers know other paths.
        """
        return {
            gemm: recipe
            for gemm, recipe in self.gemms.items()
            if kernel_paths(gemm)
            and all(kernel in places for kernel in kernel_paths(gemm))
            and (not recipe.has_state or at_path(fp8_state, gemm))
        }

    def check_kernels_are_params(self) -> None:
        """Raise if the loss changes a kernel before an FP8 layer reads it.

        Weights that are cast once for several microbatches, or carried by the state, are those of the params; and the
        GEMMs of several microbatches add up gradients of kernels as if they were those of params. There a loss that
        scales, masks or freezes a kernel would be ignored.
        """
        if self.changed:
            raise ValueError(
                "with several microbatches or a weight cache, FP8 layers must get their kernels as they are in the "
                f"params, got {'/'.join(self.changed[0])} changed by the loss; freeze params in the optimizer, or take "
                "one microbatch and no cache"
            )


def traced(function: Callable, *args: Any, **options: Any) -> tuple[ClosedJaxpr, LossTrace]:
    """The jaxpr of a function of variables, and what it says of its layers."""
    with declared_shardings() as found, listing(marks_kernels=True) as gemms:
        # A new function, or jax need not trace it again.
        program, out = jax.make_jaxpr(lambda *given: function(*given, **options), return_shape=True)(*args)
    in_fp8 = {kernel for gemm in gemms for kernel in kernel_paths(gemm)}
    # An FP8 kernel is cast from what it is; the dtype of its layer is that of results.
    of_params = {path: replace(of, dtype=None) if path in in_fp8 else of for path, of in found.items()}
    recipes = {path: gemm.recipe for path, gemm in gemms.items()}
    cached = tuple(path for path, gemm in gemms.items() if gemm.is_cached)
    return program, LossTrace(of_params, recipes, cached, changed_kernels(program, gemms, *args), out)


def checked(loss_fn: Callable, has_aux: bool) -> Callable:
    """The same loss, that raises where it returns no loss."""
    remedy = ALONE if isinstance(loss_fn, LayeredLoss) else ALONE_OR_PAIR

    def run(*args: Any, **options: Any) -> Any:
        out = loss_fn(*args, **options)
        check_loss(out, has_aux, remedy)
        return out

    return run


def reporting(loss_fn: Callable, has_aux: bool, report: Callable[..., Any]) -> Callable:
    """The same loss, which calls `report(program, trace, *args)` when a pass calls it."""
    own = checked(loss_fn, has_aux)

    def run(*args: Any, **options: Any) -> Any:
        program, trace = traced(own, *args, **options)
        report(program, trace, *args)
        return jax.tree.unflatten(jax.tree.structure(trace.out), jaxpr_as_fun(program)(*jax.tree.leaves(args)))

    return replace(loss_fn, whole=run) if isinstance(loss_fn, LayeredLoss) else run


def is_called_whole(loss_fn: Callable) -> bool:
    """Whether a pass calls the loss, and not its layers one by one."""
    return not (isinstance(loss_fn, LayeredLoss) and loss_fn.on_host)


def changed_kernels(program: ClosedJaxpr, gemms: Iterable[LayerPath], *args: Any) -> tuple[LayerPath, ...]:
    """The kernels that are not found among the params of `args`, by a walk over the program of a function of these."""
    found = origins(program.jaxpr, origins_of_params(*args), AS_IT_IS)
    return tuple(
        kernel
        for gemm in gemms
        for position, kernel in enumerate(kernel_paths(gemm))
        if None in found.get(kernel_mark(gemm, position), ())
    )


def origins_of_params(*args: Any) -> list[Origin | None]:
    """For each leaf of the arguments of a loss its number among the params; None of others."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    numbers = itertools.count()
    return [Origin(next(numbers)) if _is_param(path) else None for path in paths]


def shapes_of(tree: Any) -> Any:
    """Of arrays and numbers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def shapes_of_part(batch: Any, parts: int) -> Any:
    """Of one of so many equal parts of a batch, such as a microbatch."""

    def of_one(leaf: Any) -> jax.ShapeDtypeStruct:
        rows, others = jnp.shape(leaf)[:1], jnp.shape(leaf)[1:]
        return jax.ShapeDtypeStruct((*(count // parts for count in rows), *others), jnp.result_type(leaf))

    return jax.tree.map(of_one, batch)


def _is_param(path: tuple) -> bool:
    """Whether a leaf is among the params of the first argument."""
    return len(path) > 1 and getattr(path[0], "idx", None) == 0 and getattr(path[1], "key", None) == "params"
