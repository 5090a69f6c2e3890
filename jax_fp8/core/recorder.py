"""The way out of a backward pass: `jax.Ref`s beside the state of each GEMM, which the layer finds there.

Flax state leaves a module through its mutable collections, but a backward pass has no such door: elsewhere the amax of
an output gradient travels as the cotangent of a parameter, and is summed under weight sharing, averaged over
microbatches or clipped with the gradients. Here a `GradientTape` (grads/tape.py) puts a `Recorder` into the collection,
beside the scale and the history of each GEMM. The layer and its `custom_vjp` backward write amaxes there by maximum.
Gradients that add up over microbatches leave by the same door: the GEMM adds to the sum in place, and no pass over
memory is spent on it. So do the operands of gradients that are for later (core/deferral.py), and measurements.

Two places have no such door either. What a branch of `lax.cond` keeps for its backward is among the results of the
branch, and a Ref is no result; under `jax.vmap` nobody writes to a Ref that the batch shares. There a layer hands its
backward's amaxes out as the cotangent of a vector whose sums are maxima (see `AmaxCotangent`), and the gradients of its
kernel like everybody else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_gemm import AmaxCotangent, Record
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe

RECORDER = "recorder"


@dataclass(frozen=True)
class ListedGemm:
    """What a layer says of its FP8 GEMM: the recipe, and whether its weight was in the weight cache."""

    recipe: Recipe
    is_cached: bool


@dataclass(frozen=True)
class _Listing:
    found: dict[LayerPath, ListedGemm]
    marks_kernels: bool


_LISTING: ContextVar[_Listing | None] = ContextVar("listing", default=None)
_RECIPES: ContextVar[dict[str, Recipe] | None] = ContextVar("recipes", default=None)


class Cotangents:
    """The vector (rows,) whose cotangent takes amaxes where Refs cannot: there while the loss is traced.

    It knows how many branches were around it when it was made, and whether any layer has asked for it.
    """

    def __init__(self):
        self.vector: Any = None
        self.branches, _ = _transformations()
        self.is_used = False

    def are_needed(self) -> bool:
        """Whether the caller is traced in a branch, or under `jax.vmap`."""
        branches, batches = _transformations()
        return branches > self.branches or batches > 0


@dataclass(eq=False, kw_only=True)
class Refs:
    """What a recorder holds beside its slot: static data of a pytree, equal only to itself.

    Args:
      record: the Refs, as an op takes them; its slot is the recorder's.
      from_current: the state's scales are not to be trusted yet: a warm start.
      cotangents: the way out where Refs cannot be written to.
      first_row: of this GEMM in `cotangents`.
      needed: the names of measurements that must not be lost there.
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
        """The same as an op takes it, with the Refs as arguments, or, where they cannot be written to, without any."""
        refs, record = self.refs, self.refs.record
        refs.is_met = True
        if refs.cotangents is not None and refs.cotangents.are_needed():
            self._check_nothing_is_lost()
            if record.amax_ref is None:
                return Record()
            refs.cotangents.is_used = True
            cotangent = AmaxCotangent(refs.cotangents.vector, refs.first_row)
            return Record(slot=self.slot, cotangent=cotangent, path=record.path)
        if record.amax_ref is None and self.slot is not None and self.slot.ndim:  # nobody has handed each layer its own
            self._check_nothing_is_lost()
            return Record()
        return replace(record, slot=self.slot)

    def _check_nothing_is_lost(self) -> None:
        if self.refs.needed:
            raise ValueError(
                "what the backward of a layer measures must reach a Ref, which a branch of lax.cond and a jax.vmap do "
                f"not let it do, got {', '.join(self.refs.needed)} of a layer in one; take the layer out of it, or do "
                "not ask for this"
            )

    def tree_flatten(self) -> tuple[tuple, Refs]:
        return (self.slot,), self.refs

    @classmethod
    def tree_unflatten(cls, refs: Refs, children: Any) -> "Recorder":
        return cls(refs, children[0])


def _transformations() -> tuple[int, int]:
    """How many branches of `lax.cond` and `lax.switch`, and how many `jax.vmap`, are being traced around the caller.

    The body of `nn.scan` is traced once to see that what all its turns share depends on none of them; nothing may be
    written there, so this counts as a branch, and is traced again as a scan.
    jax documents no names for this. Should a later jax name them otherwise, a layer there fails as it would without:
    with a Ref among the results of a branch, or one that a batch shares. Nothing goes wrong in silence.
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
    """Collect the layers whose FP8 GEMMs are traced in this context by their paths, in program order.

    With `marks_kernels`, each kernel stands in the program under a name, `kernel_mark`: a walk over the program finds
    out by it where the kernel comes from.
    """
    found: dict[LayerPath, ListedGemm] = {}
    token = _LISTING.set(_Listing(found, marks_kernels))
    try:
        yield found
    finally:
        _LISTING.reset(token)


@contextmanager
def recipes_met() -> Iterator[dict[str, Recipe]]:
    """Collect the recipes of all FP8 GEMMs that are traced in this context, by what messages call them."""
    found: dict[str, Recipe] = {}
    token = _RECIPES.set(found)
    try:
        yield found
    finally:
        _RECIPES.reset(token)


def note_recipe(layer: str, recipe: Recipe) -> None:
    """A GEMM, with a kernel or without, says by which recipe it is, to whoever collects them."""
    found = _RECIPES.get()
    if found is not None:
        found[layer] = recipe


def listed_gemms() -> tuple[LayerPath, ...]:
    """The GEMMs that were traced so far in the context of `listing`."""
    listed = _LISTING.get()
    return () if listed is None else tuple(listed.found)


def register_gemm(path: LayerPath, recipe: Recipe, kernels: Any, is_cached: bool) -> Any:
    """A layer says that it makes an FP8 GEMM, and whether of a cached weight, to whoever lists them. One that is used
    several times has found its weight only if it has each time. Returns the kernels, under their names where they are
    asked for.
    """
    listed = _LISTING.get()
    if listed is None:
        return kernels
    before = listed.found.get(path)
    listed.found[path] = ListedGemm(recipe, is_cached and (before is None or before.is_cached))
    if not listed.marks_kernels:
        return kernels
    leaves, structure = jax.tree.flatten(kernels)
    return structure.unflatten([checkpoint_name(leaf, kernel_mark(path, i)) for i, leaf in enumerate(leaves)])


def kernel_mark(gemm: LayerPath, position: int) -> str:
    """The name under which a kernel stands in a program, at its place among those of its GEMM."""
    return f"jax_fp8 kernel {position} of {'/'.join(gemm)}"
