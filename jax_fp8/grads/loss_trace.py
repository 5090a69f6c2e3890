"""All that a step must know of a loss, read from one trace for each shape of its arguments; nothing is computed.

    loss ─jaxpr→ LossTrace: which GEMMs are in FP8 by which recipe, and which find their weights in a cache
                            how params may be split over devices
                            which kernels the loss changes before an FP8 layer reads them

A step needs this before its first call. A warm pass traces the loss anyhow: `reporting` makes the `LossTrace` from that
trace, so that the loss is not called once more.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import KeyPath

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import kernel_mark, listing
from jax_fp8.core.shards import ParamSharding, declared_shardings
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.grads.checks import ALONE, ALONE_OR_PAIR, check_loss
from jax_fp8.jaxprs.named_values import UNCHANGED, Origin, origins

# Primitives with which a kernel still counts as unchanged: a cast, or another shape of the same elements. The gradient
# passes through them unchanged too.
AS_IT_IS = (*UNCHANGED, "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclass(frozen=True)
class LossTrace:
    """The layers of a loss, as its trace shows them.

    Args:
      declared: by the path of a param, how it may be split.
      gemms: the GEMMs in FP8, in program order, with their recipes.
      cached: the GEMMs that have found their weights in the collection "fp8_cache".
      changed: kernels of these GEMMs that are not params, but computed from params by the loss.
      out: the shapes of the loss's result.
    """

    declared: Mapping[LayerPath, ParamSharding]
    gemms: Mapping[LayerPath, Recipe]
    cached: tuple[LayerPath, ...] = ()
    changed: tuple[LayerPath, ...] = ()
    out: PyTree = field(default=None, compare=False)

    @classmethod
    def from_function(cls, function: Callable, *args: PyTree) -> "LossTrace":
        """Trace a function of variables, or `model.init`, with arrays or their shapes."""
        return traced(function, *shapes_of(args))[1]

    def gemms_of(self, places: Mapping[LayerPath, object], fp8_state: Mapping) -> dict[LayerPath, Recipe]:
        """The GEMMs whose kernels are at their paths in `places`, and whose scales are in the state. Others exist where
        a loss applies a model to a part of the variables, so that its layers know other paths.

        Args:
          places: by the path of a param, anything.
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

        A step casts params, once for several microbatches or into the cache of its state, and its GEMMs add up kernel
        gradients over microbatches as gradients of params. A loss that scales, masks or freezes a kernel would have no
        effect there.
        """
        if self.changed:
            raise ValueError(
                "with several microbatches or a weight cache, FP8 layers must get their kernels as they are in the "
                f"params, got {'/'.join(self.changed[0])} changed by the loss; freeze params in the optimizer, or take "
                "one microbatch and no cache"
            )


def traced(function: Callable, *args: PyTree, **options: object) -> tuple[ClosedJaxpr, LossTrace]:
    """The jaxpr of a function of variables, and its `LossTrace`."""
    with declared_shardings() as shardings, listing(marks_kernels=True) as gemms:
        # A new lambda each time: jax would not trace a function again that it has traced before.
        program, out = jax.make_jaxpr(lambda *own_args: function(*own_args, **options), return_shape=True)(*args)
    in_fp8 = {kernel for gemm in gemms for kernel in kernel_paths(gemm)}
    # A kernel in FP8 is cast from the dtype of its param. The dtype that its layer declares is that of results.
    declared = {path: replace(own, dtype=None) if path in in_fp8 else own for path, own in shardings.items()}
    recipes = {path: gemm.recipe for path, gemm in gemms.items()}
    cached = tuple(path for path, gemm in gemms.items() if gemm.is_cached)
    return program, LossTrace(declared, recipes, cached, changed_kernels(program, gemms, *args), out)


def checked(loss_fn: Callable, has_aux: bool) -> Callable[..., PyTree]:
    """The same loss, which raises where its result is not a loss."""
    remedy = ALONE if isinstance(loss_fn, LayeredLoss) else ALONE_OR_PAIR

    def run(*args: PyTree, **options: object) -> PyTree:
        out = loss_fn(*args, **options)
        check_loss(out, has_aux, remedy)
        return out

    return run


def reporting(loss_fn: Callable, has_aux: bool, report: Callable[..., object]) -> Callable[..., PyTree]:
    """The same loss, which calls `report(program, trace, *args)` when a pass calls it."""
    own = checked(loss_fn, has_aux)

    def run(*args: PyTree, **options: object) -> PyTree:
        program, trace = traced(own, *args, **options)
        report(program, trace, *args)
        return jax.tree.unflatten(jax.tree.structure(trace.out), jaxpr_as_fun(program)(*jax.tree.leaves(args)))

    return replace(loss_fn, whole=run) if isinstance(loss_fn, LayeredLoss) else run


def is_called_whole(loss_fn: Callable) -> bool:
    """Whether a pass calls the loss as a whole, and not its layers one by one."""
    return not (isinstance(loss_fn, LayeredLoss) and loss_fn.on_host)


def changed_kernels(program: ClosedJaxpr, gemms: Iterable[LayerPath], *args: PyTree) -> tuple[LayerPath, ...]:
    """The kernels in a program that are not params among its arguments `args`."""
    by_mark = origins(program.jaxpr, origins_of_params(*args), AS_IT_IS)
    return tuple(
        kernel
        for gemm in gemms
        for position, kernel in enumerate(kernel_paths(gemm))
        if None in by_mark.get(kernel_mark(gemm, position), ())
    )


def origins_of_params(*args: PyTree) -> list[Origin | None]:
    """For each leaf of the arguments of a loss, its number among the params; None for other leaves."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    numbers = itertools.count()
    return [Origin(next(numbers)) if _is_param(path) else None for path in paths]


def shapes_of(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree of arrays and numbers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def shapes_of_part(batch: Batch, parts: int) -> Batch:
    """The shapes of one of so many equal parts of a batch, such as a microbatch."""

    def shape_of_part(leaf: jax.typing.ArrayLike) -> jax.ShapeDtypeStruct:
        rows, others = jnp.shape(leaf)[:1], jnp.shape(leaf)[1:]
        return jax.ShapeDtypeStruct((*(count // parts for count in rows), *others), jnp.result_type(leaf))

    return jax.tree.map(shape_of_part, batch)


def _is_param(path: KeyPath) -> bool:
    """Whether a leaf is among the params of the first argument."""
    return len(path) > 1 and getattr(path[0], "idx", None) == 0 and getattr(path[1], "key", None) == "params"
