"""The way out of a backward pass, and the only file that knows it: one `jax.Ref` per GEMM, beside the GEMM's state.

Flax state leaves a module through its mutable collections, but a backward pass has no such door: elsewhere the amax of
an output gradient travels as the cotangent of a parameter, and is summed under weight sharing, averaged over
microbatches or clipped with the gradients. Here whoever differentiates puts a `Recorder` into the collection, beside
the scale and the history of each GEMM. The layer and its `custom_vjp` backward write amaxes there by maximum. Gradients
that add up over microbatches leave by the same door: the GEMM adds to the sum in place,
and no pass over memory is spent on it. So do the operands of gradients that are for later (core/deferral.py).

Two places have no such door either. What a branch of `lax.cond` keeps for its backward is among the results of the
branch, and a Ref is no result; under `jax.vmap` nobody writes to a Ref that the batch shares. There a layer hands its
backward's amaxes out as the cotangent of a vector whose sums are maxima (see `AmaxCotangent`), and the gradients of its
kernel like everybody else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_gemm import AmaxCotangent, GradientSum, Record
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe

RECORDER = "recorder"


@dataclass(frozen=True)
class ListedGemm:
    """What a layer says of its FP8 GEMM: the recipe, and whether its weight was in the weight cache."""

    recipe: Recipe
    is_cached: bool


_LISTING: ContextVar[dict[LayerPath, ListedGemm] | None] = ContextVar("listing", default=None)
_RECIPES: ContextVar[dict[str, Recipe] | None] = ContextVar("recipes", default=None)


class ByIdentity:
    """Keeps a Ref, or what holds Refs, in the static part of a pytree:
    two are equal only when they are the same one.
    """

    __slots__ = ("ref",)

    def __init__(self, ref):
        self.ref = ref


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


@jax.tree_util.register_pytree_node_class
class Recorder:
    """A GEMM's way out of a backward pass, beside its state in the collection while `value_and_grad` runs.

    The Refs are static data of the pytree and are closed over wherever a transformation (`nn.scan`, `nn.remat`, `jit`)
    rebuilds the collection; only the slot is an array, one number per stacked layer, so that a scan over layers hands
    each layer its own. `from_current` says that the state's scales are not to be trusted yet: a warm start.

    Args:
      amax: the Ref of amaxes; None for a GEMM without state.
      sums: the Refs of its kernels' gradients, or ().
      weight: of those.
      from_current: bool.
      slot: i32[...] of stacked layers, else None.
      cotangents: where Refs cannot be written to.
      first_row: of this GEMM in `cotangents`.
      deferral: of the operands of its kernels' gradients, if these are for later.
      health: the Ref of how its tensors were cast, if anybody asks.
      path: of the GEMM in the state, if anybody asks which rows are staged.
    """

    def __init__(
        self,
        amax: ByIdentity | None,
        sums: tuple[ByIdentity, ...],
        weight: float,
        from_current: bool,
        slot,
        cotangents: Cotangents | None = None,
        first_row: int = 0,
        deferral: ByIdentity | None = None,
        health: ByIdentity | None = None,
        path: LayerPath | None = None,
    ):
        self._static = amax, sums, weight, from_current, cotangents, first_row, deferral, health, path
        self._amax, self._sums, self._weight, self.from_current, self._cotangents, self._first_row = self._static[:-3]
        self._deferral, self._health, self._path = deferral, health, path
        self.slot = slot

    @property
    def amax_ref(self) -> jax.Ref | None:
        return None if self._amax is None else self._amax.ref

    @property
    def record(self) -> Record:
        """The same as an op takes it, with the Refs as arguments, or, where they cannot be written to, without any."""
        if self._cotangents is not None and self._cotangents.are_needed():
            if self._amax is None:
                return Record()
            self._cotangents.is_used = True
            cotangent = AmaxCotangent(self._cotangents.vector, self._first_row)
            return Record(slot=self.slot, cotangent=cotangent, path=self._path)
        gradient = GradientSum(tuple(total.ref for total in self._sums), self._weight) if self._sums else None
        deferral = None if self._deferral is None else self._deferral.ref
        if self._amax is None and self.slot is not None and self.slot.ndim:  # nobody has handed each layer its own
            return Record()
        health = None if self._health is None else self._health.ref
        return Record(self.amax_ref, self.slot, gradient, deferral=deferral, health_ref=health, path=self._path)

    def named(self, kernels: Any) -> Any:
        """The kernels of the GEMM, under their names while operands are searched for."""
        return kernels if self._deferral is None else self._deferral.ref.named(kernels)

    def tree_flatten(self):
        return (self.slot,), self._static

    @classmethod
    def tree_unflatten(cls, static, children):
        amax, sums, weight, from_current, *others = static
        return cls(amax, sums, weight, from_current, children[0], *others)


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
def listing() -> Iterator[dict[LayerPath, ListedGemm]]:
    """Collect the layers whose FP8 GEMMs are traced in this context by their paths, in program order."""
    found: dict[LayerPath, ListedGemm] = {}
    token = _LISTING.set(found)
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


def register_gemm(path: LayerPath, recipe: Recipe, is_cached: bool) -> None:
    """A layer says that it makes an FP8 GEMM, and whether of a cached weight, to whoever lists them. One that is used
    several times has found its weight only if it has each time.
    """
    found = _LISTING.get()
    if found is not None:
        before = found.get(path)
        found[path] = ListedGemm(recipe, is_cached and (before is None or before.is_cached))
