"""The way out of a backward pass, and the only file that knows it: one `jax.Ref` per GEMM, beside the GEMM's state.

Flax state leaves a module through its mutable collections, but a backward pass has no such door: elsewhere the amax of an output gradient
travels as the cotangent of a parameter, and is summed under weight sharing, averaged over microbatches or clipped with the gradients.
Here whoever differentiates puts a `Recorder` into the collection, beside the scale and the history of each GEMM. The layer and its
`custom_vjp` backward write amaxes there by maximum. Gradients that add up over microbatches leave by the same door: the GEMM adds to the
sum in place, and no pass over memory is spent on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jax_fp8.core.fp8_gemm import GradientSum, Record
from jax_fp8.core.paths import LayerPath

RECORDER = "recorder"
_LISTING: ContextVar[dict[LayerPath, None] | None] = ContextVar("listing", default=None)


class ByIdentity:
    """Keeps a Ref in the static part of a pytree: two are equal only when they are the same one."""

    __slots__ = ("ref",)

    def __init__(self, ref):
        self.ref = ref


@jax.tree_util.register_pytree_node_class
class Recorder:
    """A GEMM's way out of a backward pass, beside its state in the collection while `value_and_grad` runs.

    The Refs are static data of the pytree and are closed over wherever a transformation (`nn.scan`, `nn.remat`, `jit`)
    rebuilds the collection; only the slot is an array, one number per stacked layer, so that a scan over layers hands
    each layer its own. `from_current` says that the state's scales are not to be trusted yet: a warm start.
    """

    def __init__(self, amax: ByIdentity | None, sums: tuple[ByIdentity, ...], weight: float, from_current: bool, slot):
        self._amax, self._sums, self._weight = amax, sums, weight
        self.from_current, self.slot = from_current, slot

    @property
    def record(self) -> Record:
        """The same as an op takes it, with the Refs as arguments."""
        gradient = GradientSum(tuple(total.ref for total in self._sums), self._weight) if self._sums else None
        return Record(None if self._amax is None else self._amax.ref, self.slot, gradient)

    def tree_flatten(self):
        return (self.slot,), (self._amax, self._sums, self._weight, self.from_current)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*static, *children)


@contextmanager
def listing() -> Iterator[dict[LayerPath, None]]:
    """Collect the layers whose FP8 GEMMs are traced in this context; the keys are their paths, in program order."""
    found: dict[LayerPath, None] = {}
    token = _LISTING.set(found)
    try:
        yield found
    finally:
        _LISTING.reset(token)


def register_gemm(path: LayerPath) -> None:
    """A layer says that it makes an FP8 GEMM, to whoever lists them."""
    found = _LISTING.get()
    if found is not None:
        found[path] = None
