"""Random keys for a loss that draws, such as one with dropout. Each step, each microbatch and each device's part of the
batch gets its own keys.

    step, batch ─drawn→ batch with (step, row number) beside each row ─microbatches, devices→ a part of it
    seeds, the first (step, row number) of the part ─fold_in→ keys → loss

A batch is split by rows. Each part starts at a different row, so each gets its own keys. The keys depend only on seeds,
step and row. So the state keeps no key, and a resumed run draws the same numbers as an uninterrupted one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import describe
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.distributed.microbatches import PendingStep
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.state.checks import check_batch
from jax_fp8.state.train_state import TrainState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawnBatch:
    """A batch, and u32[rows, 2]: for each of its rows the step, and the row's number in the step."""

    batch: Batch
    rows: jax.Array


class DrawingLoss:
    """`loss_fn(variables, batch, rngs=...)` as a loss of variables and a `DrawnBatch`.

    Args:
      loss_fn: the loss.
      rngs: the seeds: a random key for each stream, such as "dropout".
    """

    def __init__(self, loss_fn: Callable, rngs: Mapping[str, jax.Array]):
        self._loss_fn = loss_fn
        self.whole_batch = getattr(loss_fn, "whole_batch", None)
        # NumPy arrays become constants of the program, on every device of a mesh. A jax array would lie on one device.
        self._seeds = {name: (np.asarray(jax.random.key_data(key)), _impl(key)) for name, key in rngs.items()}

    def __call__(self, variables: Variables, drawn: DrawnBatch) -> PyTree:
        step, row = drawn.rows[0]
        seeds = {
            name: jax.random.wrap_key_data(jnp.asarray(data), impl=impl) for name, (data, impl) in self._seeds.items()
        }
        rngs = {name: jax.random.fold_in(jax.random.fold_in(seed, step), row) for name, seed in seeds.items()}
        return self._loss_fn(variables, drawn.batch, rngs=rngs)


def drawn(loss_fn: Callable, state: TrainState, batch: Batch, microbatch: int | jax.Array = 0) -> Batch:
    """The batch of this step, or its microbatch of this number, as the loss takes it: with row numbers if it draws."""
    if not isinstance(loss_fn, DrawingLoss):
        return batch
    check_batch(batch, 1)
    rows = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), None)
    if rows is None:
        raise ValueError(f"with rngs a batch must have rows, got {describe(batch)}; give it a leading dim")
    numbers = jnp.asarray(microbatch, jnp.uint32) * rows + jnp.arange(rows, dtype=jnp.uint32)
    steps = jnp.broadcast_to(state.step.astype(jnp.uint32), numbers.shape)
    return DrawnBatch(batch, jnp.stack([steps, numbers], axis=1))


def drawn_whole(loss_fn: Callable, state: TrainState, batch: Batch, microbatches: int) -> Batch:
    """`drawn` of a whole batch before it is split. A `WholeBatchLoss` prepares the batch first."""
    prepare = getattr(loss_fn, "whole_batch", None)
    if microbatches > 1 and prepare is not None:
        check_batch(batch, microbatches)
        batch = prepare(batch)
    return drawn(loss_fn, state, batch)


def drawn_next(
    loss_fn: Callable, state: TrainState, pending: PendingStep, microbatch: Batch, is_first: bool | jax.Array
) -> Batch:
    """`drawn` of the next microbatch of `pending`."""
    if not isinstance(loss_fn, DrawingLoss):
        return microbatch
    begins = is_first | (pending.step != state.step)
    return drawn(loss_fn, state, microbatch, jnp.where(begins, 0, pending.count))


def check_rngs(rngs: object, loss_fn: Callable, parallel: Parallelism | None) -> None:
    """Raise unless these are seeds from which a step can draw."""
    if not isinstance(rngs, Mapping) or not rngs or not all(isinstance(name, str) for name in rngs):
        raise ValueError(
            f"rngs must be a dict of random keys by the names of their streams, got {describe(rngs)}; "
            'pass {"dropout": jax.random.key(0)}'
        )
    for name, key in rngs.items():
        is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if not is_key or key.shape:
            raise ValueError(f"rngs[{name!r}] must be one random key, got {describe(key)}; pass jax.random.key(seed)")
    if parallel is not None and parallel.stages > 1:
        raise ValueError(
            "a pipeline runs layers one by one and passes them no keys, got rngs with a mesh that has the axis pipe; "
            "leave out one of them"
        )
    if isinstance(loss_fn, LayeredLoss) and loss_fn.on_host:
        raise ValueError(
            "a loss whose layers keep activations on the host runs layers one by one and passes them no keys, got it "
            'with rngs; take another remat than "offload:N", or leave out rngs'
        )


def _impl(key: jax.Array) -> str:
    return str(jax.random.key_impl(key))
