"""A model of tanh layers on the stages of a pipeline, and the same without one, for tests of the runner."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_fp8.kernels.uninitialized import uninitialized
from jax_fp8.parallel.runner import run_schedule
from jax_fp8.parallel.schedule import Schedule
from jax_fp8.parallel.schedules import layers_of_stage
from jax_fp8.parallel.ticks import Ticks, make_ticks

TABLES = ("branch", "microbatch", "taken", "put_activation", "put_gradient", "loss")


@dataclass(frozen=True)
class TanhLayers:
    """A chunk of layers y = tanh(x w), with forward and the halves of backward by hand.

    `totals` are the sums of gradients, and how many weight gradients there were.
    """

    weights: jax.Array  # (layers, width, width)

    def no_totals(self):
        return jnp.zeros_like(self.weights), jnp.int32(0)

    def forward(self, x):
        kept = [x]
        for weight in self.weights:
            kept.append(jnp.tanh(kept[-1] @ weight))
        return kept[-1], kept

    def backward(self, kept, dy, totals):
        dx, operands, totals = self.input_gradient(kept, dy, totals)
        return dx, self.weight_gradient(kept, operands, totals)

    def input_gradient(self, kept, dy, totals):
        operands = []
        for number in reversed(range(len(self.weights))):
            operands.append(dy * (1 - kept[number + 1] ** 2))
            dy = operands[-1] @ self.weights[number].T
        return dy, operands[::-1], totals

    def weight_gradient(self, kept, operands, totals):
        sums, count = totals
        products = [x.T @ dz for x, dz in zip(kept, operands, strict=False)]
        return sums + jnp.stack(products), count + 1


def loss_of(number, y):
    """The loss of a microbatch, which depends on its number."""
    return jnp.sum(jnp.cos(y + number))


class Pipeline:
    """A schedule, a model with two layers on each stage, and the program that runs one with the other.

    The tables of the schedule are arguments of the program, so a test of a wrong table needs no new compilation.
    """

    def __init__(self, schedule: Schedule, rows: int = 2, width: int = 8):
        self.ticks, self.microbatches = make_ticks(schedule), schedule.microbatches
        self.stages, self.chunks = schedule.stages, schedule.chunks
        self.groups = -(-self.microbatches // self.stages)
        rng = np.random.default_rng(0)
        self.weights = rng.normal(size=(2 * self.stages, width, width)).astype(np.float32) / 2
        self.batch = rng.normal(size=(self.microbatches, rows, width)).astype(np.float32)
        of_stages = [layers_of_stage(stage, 2 * self.stages, self.stages, self.chunks) for stage in range(self.stages)]
        self.places = np.array(of_stages)  # (stages, chunks, layers of a chunk)

    @functools.cached_property
    def program(self):
        return self.program_on(Mesh(np.array(jax.devices()[: self.stages]), ("pipe",)))

    def program_on(self, mesh: Mesh):
        """The compiled function of tables, weights (stages, chunks, ...) and inputs."""
        specs = self.specs
        mapped = jax.shard_map(self._on_stage, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        return jax.jit(mapped)

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        return PartitionSpec(), PartitionSpec("pipe"), PartitionSpec()

    def arguments(self, ticks: Ticks | None = None) -> tuple:
        """The program's arguments, with the tables of `ticks` or of the schedule."""
        tables = {name: getattr(ticks or self.ticks, name) for name in TABLES}
        behind = np.full((self.groups * self.stages - self.microbatches, *self.batch.shape[1:]), 1e3, np.float32)
        return tables, self.weights[self.places], np.concatenate([self.batch, behind])

    def _on_stage(self, tables, weights, inputs):
        def loss(number, y, totals):
            value, dy = jax.value_and_grad(loss_of, argnums=1)(number, y)
            total, numbers = totals
            return dy, (total + jnp.where(number < self.microbatches, value, 0), numbers.at[number].add(1))

        ticks = dataclasses.replace(self.ticks, **tables)
        nothing = jnp.float32(0), jnp.zeros(len(inputs), jnp.int32)
        chunks = [TanhLayers(of_chunk) for of_chunk in weights[0]]
        found = run_schedule(ticks, chunks, loss, inputs, nothing, uninitialized)
        return jax.tree.map(lambda x: x[None], found)

    def run(self, ticks: Ticks | None = None) -> "Found":
        """The program's results."""
        dx, totals, (loss, numbers) = self.program(*self.arguments(ticks))
        gradients = np.zeros_like(self.weights)
        gradients[self.places] = np.stack([sums for sums, _ in totals], axis=1)
        counts = np.stack([count for _, count in totals], axis=1)
        return Found(*map(np.asarray, (loss.sum(), gradients, dx, counts, numbers.sum(axis=0))))

    @functools.cached_property
    def expected(self) -> tuple[Any, Any]:
        """The loss and its gradients, without a pipeline."""

        def loss(weights, batch):
            x = batch
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return sum(loss_of(number, y) for number, y in enumerate(x))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(self.weights, self.batch)

    def is_right(self, ticks: Ticks | None = None) -> bool:
        """Whether all results are as expected, and each was computed as often as expected."""
        found, (loss, (gradients, dx)) = self.run(ticks), self.expected
        close = functools.partial(np.allclose, rtol=1e-4, atol=1e-5)
        return bool(
            close(found.loss, loss)
            and close(found.gradients, gradients)
            and close(found.dx[0, : self.microbatches], dx)
            and not found.dx[1:].any()  # zeros on all other stages
            and (found.counts == self.microbatches).all()
            and (found.numbers == 1).all()
        )


@dataclass(frozen=True)
class Found:
    """`dx`: of each stage. `counts`: weight gradients of each stage and chunk. `numbers`: losses of each microbatch."""

    loss: np.ndarray
    gradients: np.ndarray
    dx: np.ndarray
    counts: np.ndarray
    numbers: np.ndarray
