"""The way out of a backward pass: `jax.Ref`s beside the state of each GEMM, where the layer finds them.

Flax state leaves a module through its mutable collections, but a backward pass cannot write to these. Other libraries
return the amax of an output gradient as the cotangent of a parameter; then it is summed under weight sharing, averaged
over microbatches or clipped with the gradients. Here a `GradientTape` (grads/tape.py) puts a `Recorder` into the
collection, beside the scale and the history of each GEMM. The layer and its `custom_vjp` backward write amaxes to its
Refs by maximum. Gradient accumulation uses Refs too: the wgrad GEMM adds to the sum in place, without another pass over
memory. So do the operands of delayed weight gradients (core/deferral.py), and measurements.

In two places Refs do not work. The residuals of a branch of `lax.cond` are among the results of the branch, and a Ref
cannot be a result; and under `jax.vmap` no layer can write to a Ref that the batch shares. There a layer returns its
backward's amaxes as the cotangent of a vector whose sums are maxima (see `AmaxCotangent`), and the gradients of its
kernel as usual.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_gemm import AmaxCotangent, Record
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree

RECORDER = "recorder"


@dataclass(frozen=True)
class ListedGemm:
    """A layer's FP8 GEMM: its recipe, and whether its weight was in the weight cache."""

    recipe: Recipe
    is_cached: bool


@dataclass(frozen=True)
class _Listing:
    gemms: dict[LayerPath, ListedGemm]
    marks_kernels: bool


_LISTING: ContextVar[_Listing | None] = ContextVar("listing", default=None)
_RECIPES: ContextVar[dict[str, Recipe] | None] = ContextVar("recipes", default=None)


class Cotangents:
    """The vector (rows,) whose cotangent takes amaxes where Refs cannot; it exists while the loss is traced.

    `branches` is how many branches were around it when it was made, `is_used` whether any layer has asked for it.
    """

    def __init__(self):
        self.vector: PyTree = None
        self.branches, _ = _transformations()
        self.is_used = False

    def are_needed(self) -> bool:
        """Whether the caller is traced in a further branch, or under `jax.vmap`."""
        branches, batches = _transformations()
        return branches > self.branches or batches > 0


@dataclass(eq=False, kw_only=True)
class Refs:
    """The static part of a recorder, all but its slot; equal only to itself.

    Args:
      record: the Refs, as an op takes them; the recorder replaces its slot.
      from_current: scale every tensor by its own amax, as in a warm start, where the state has no history yet.
      cotangents: takes amaxes where Refs cannot be written to.
      first_row: the first row of this GEMM in `cotangents`.
      needed: the names of measurements that must not be lost; `cotangents` cannot take them.
      is_met: whether a layer has asked for the record.
    """

    record: Record
    from_current: bool = False
    cotangents: Cotangents | None = None
    first_row: int = 0
    needed: tuple[str, ...] = ()
    is_met: bool = False


@jax.tree_util.register_pytree_node_class
class Recorder:
    """A GEMM's way out of a backward pass, beside its state in the collection while gradients are taken.

    The Refs are static data of the pytree and are closed over wherever a transformation (`nn.scan`, `nn.remat`, `jit`)
    rebuilds the collection; only the slot is an array, one number per stacked layer, so that a scan over layers hands
    each layer its own.

    Args:
      refs: static.
      slot: i32[...] of stacked layers, else None.
    """

    def __init__(self, refs: Refs, slot: jax.Array | None = None):
        self.refs, self.slot = refs, slot

    @property
    def from_current(self) -> bool:
        return self.refs.from_current

    @property
    def record(self) -> Record:
        """The record for an op: with the Refs, or, where they cannot be written to, without any."""
        refs, record = self.refs, self.refs.record
        refs.is_met = True
        if refs.cotangents is not None and refs.cotangents.are_needed():
            self._check_nothing_is_lost()
            if record.amax_ref is None:
                return Record()
            refs.cotangents.is_used = True
            cotangent = AmaxCotangent(refs.cotangents.vector, refs.first_row)
            return Record(slot=self.slot, cotangent=cotangent, path=record.path)
        if record.amax_ref is None and self.slot is not None and self.slot.ndim:  # no scan has split the slots by layer
            self._check_nothing_is_lost()
            return Record()
        return replace(record, slot=self.slot)

    def _check_nothing_is_lost(self) -> None:
        if self.refs.needed:
            raise ValueError(
                "a layer whose backward measures must not be in a branch of lax.cond or under jax.vmap, where a "
                f"measurement cannot reach its Ref, got one that measures {', '.join(self.refs.needed)}; take the "
                "layer out of it, or do not ask for the measurement"
            )

    def tree_flatten(self) -> tuple[tuple[jax.Array | None], Refs]:
        return (self.slot,), self.refs

    @classmethod
    def tree_unflatten(cls, refs: Refs, children: tuple[jax.Array | None]) -> "Recorder":
        return cls(refs, children[0])


def _transformations() -> tuple[int, int]:
    """How many branches of `lax.cond` and `lax.switch`, and how many `jax.vmap`, are being traced around the caller.

    Flax traces the body of `nn.scan` once to check that the values which all iterations share depend on none of them.
    No Ref may be written in that trace, so it counts as a branch; Flax then traces the body again as a scan.
    jax documents none of these names. If a later jax changes them, a layer in a branch or a vmap fails with jax's own
    error, of a Ref among the results of a branch or one that a batch shares. No amax is lost in silence.
    """
    branches, batches = 0, 0
    with take_current_trace() as trace:
        while trace is not None:
            info = getattr(getattr(trace, "frame", None), "debug_info", None)
            branches += getattr(info, "traced_for", None) in ("cond", "switch", "flax scan")
            batches += type(trace).__name__ == "BatchTrace"
            trace = getattr(trace, "parent_trace", None)
    return branches, batches


@contextmanager
def listing(marks_kernels: bool = False) -> Iterator[dict[LayerPath, ListedGemm]]:
    """Collect the FP8 GEMMs that layers trace in this context, by path, in program order.

    With `marks_kernels`, each kernel has a name in the program, `kernel_mark`, so that a walk over the program can find
    where the kernel comes from.
    """
    gemms: dict[LayerPath, ListedGemm] = {}
    token = _LISTING.set(_Listing(gemms, marks_kernels))
    try:
        yield gemms
    finally:
        _LISTING.reset(token)


@contextmanager
def recipes_met() -> Iterator[dict[str, Recipe]]:
    """Collect the recipes of all FP8 GEMMs that are traced in this context, by the name of the layer in messages."""
    recipes: dict[str, Recipe] = {}
    token = _RECIPES.set(recipes)
    try:
        yield recipes
    finally:
        _RECIPES.reset(token)


def note_recipe(layer: str, recipe: Recipe) -> None:
    """Note the recipe of a GEMM, with a kernel or without; without `recipes_met` around it, do nothing."""
    recipes = _RECIPES.get()
    if recipes is not None:
        recipes[layer] = recipe


def listed_gemms() -> tuple[LayerPath, ...]:
    """The GEMMs that were traced so far in the context of `listing`."""
    listed = _LISTING.get()
    return () if listed is None else tuple(listed.gemms)


def register_gemm(path: LayerPath, recipe: Recipe, kernels: PyTree, is_cached: bool) -> PyTree:
    """List a layer's FP8 GEMM, where `listing` is around it, and return its kernels, marked if the listing asks for it.

    A GEMM that runs several times counts as cached only if its weight was in the cache each time.
    """
    listed = _LISTING.get()
    if listed is None:
        return kernels
    before = listed.gemms.get(path)
    listed.gemms[path] = ListedGemm(recipe, is_cached and (before is None or before.is_cached))
    if not listed.marks_kernels:
        return kernels
    leaves, structure = jax.tree.flatten(kernels)
    return structure.unflatten([checkpoint_name(leaf, kernel_mark(path, i)) for i, leaf in enumerate(leaves)])


def kernel_mark(gemm: LayerPath, position: int) -> str:
    """The name of a kernel in a program, by its position among the kernels of its GEMM."""
    return f"jax_fp8 kernel {position} of {'/'.join(gemm)}"
