"""How a step is spread over the devices of a mesh: one value, `Parallelism`. Each axis of the mesh has a fixed name:

    data     splits the batch; params are the same on all its devices
    fsdp     splits the batch too, and params, gradients and optimizer state (ZeRO: https://arxiv.org/abs/1910.02054)
    expert   splits the batch too, and the experts of a mixture: tokens travel to their experts
    tensor   splits layers; the batch is the same on all its devices
    pipe     each of its devices computes some of the layers, one microbatch after the other; it splits the storage of
             params, as `fsdp` does

A mesh may leave out any of them, or give it the size 1.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_fp8.core.checks import check_bool, describe
from jax_fp8.core.shards import ExpertParallel, TensorParallel
from jax_fp8.core.types import Batch
from jax_fp8.parallel.schedule import Schedule
from jax_fp8.parallel.schedules import make_schedule

PIPE, DATA, FSDP, EXPERT, TENSOR = "pipe", "data", "fsdp", "expert", "tensor"
AXES = (PIPE, DATA, FSDP, EXPERT, TENSOR)
BATCH_AXES = (DATA, FSDP, EXPERT)  # each splits the batch
Rules = Sequence[tuple[str, PartitionSpec]]
GRADIENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Parallelism:
    """How a step is spread over the devices of a mesh: the argument `parallel` of functions that take a mesh.

    These are `make_train_step`, `value_and_grad`, `warm_start` and `shardings`; all take a bare mesh as well. Two
    objects with the same values are equal and have the same hash.

    Args:
      mesh: a `jax.sharding.Mesh`. Its axes `data`, `fsdp` and `expert` split the batch. `fsdp` splits params and
        optimizer state too (ZeRO, https://arxiv.org/abs/1910.02054), and `expert` the experts of mixtures
        (https://arxiv.org/abs/2006.16668). `tensor` splits the layers (https://arxiv.org/abs/1909.08053), and `pipe`
        makes them stages of a pipeline, through which microbatches pass. Any may be left out. An axis by another name
        is refused.
      rules: pairs of a pattern and a `PartitionSpec`. A rule applies to the params in whose path (names joined by "/")
        `re.search` finds the pattern; the first such rule counts. Its spec names `fsdp` and `tensor`, and describes the
        param's last dims. Without a rule, a param's layer and its shape decide.
      sequence_parallel: between layers, each device of `tensor` keeps its part of the rows
        (https://arxiv.org/abs/2205.05198); refused without that axis.
      gradient_dtype: the dtype in which gradients of matrices are summed over `data` and `fsdp`. None is float32,
        unless both gradients and params have 16 bits. jnp.bfloat16 sends half the bytes. Others are refused.
      schedule: the pipeline's: "1f1b" (the default, None) or "interleaved" (https://arxiv.org/abs/2104.04473), "gpipe"
        (https://arxiv.org/abs/1811.06965), or "zero-bubble" (ZB-H1, https://arxiv.org/abs/2401.10241); refused without
        the axis `pipe`.
      chunks: groups of layers on each stage. None is 2 for "interleaved", which needs several, and 1 for the others,
        which have one; refused without the axis `pipe`.

    Raises:
      ValueError: if a field has another type or value, or needs an axis that the mesh does not have.

    Example:
      >>> import jax
      >>> import jax_fp8 as fp8
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"))
      >>> parallel = fp8.Parallelism(mesh, rules=[("embedding", P("tensor", "fsdp"))])
      >>> parallel.mesh.axis_names, parallel.stages
      (('fsdp', 'tensor'), 1)
    """

    mesh: Mesh
    rules: Rules = ()
    sequence_parallel: bool = False
    gradient_dtype: jax.typing.DTypeLike | None = None
    schedule: str | None = None
    chunks: int | None = None

    def __post_init__(self):
        check_mesh(self.mesh)
        _check_rules(self.rules)
        check_bool("sequence_parallel", self.sequence_parallel)
        if self.sequence_parallel and self.size(TENSOR) == 1:
            raise ValueError(
                "sequence parallelism splits rows over the axis `tensor`, which this mesh does not have, "
                f"got {describe_mesh(self.mesh)}; add the axis, or leave sequence_parallel out"
            )
        schedule, chunks = self.schedule, self.chunks
        if self.stages > 1:
            schedule = "1f1b" if schedule is None else schedule
            chunks = (2 if schedule == "interleaved" else 1) if chunks is None else chunks
            make_schedule(schedule, self.stages, self.stages, chunks)  # raises unless there is one
        elif schedule is not None or chunks is not None:
            raise ValueError(
                "schedule and chunks are about the axis `pipe`, which this mesh does not have, "
                f"got {describe_mesh(self.mesh)}; add the axis, or leave them out"
            )
        gradient_dtype = _check_gradient_dtype(self.gradient_dtype)
        # One form for each meaning: objects that mean the same are then equal.
        vars(self).update(rules=tuple(self.rules), gradient_dtype=gradient_dtype, schedule=schedule, chunks=chunks)

    def size(self, axis: str) -> int:
        """Devices along an axis; 1 where the mesh has none."""
        return dict(self.mesh.shape).get(axis, 1)

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return tuple(axis for axis in BATCH_AXES if self.size(axis) > 1)

    @property
    def batch_parts(self) -> int:
        return math.prod(self.size(axis) for axis in self.batch_axes)

    @property
    def stages(self) -> int:
        """The stages of the pipeline; 1 without a pipeline."""
        return self.size(PIPE)

    @property
    def num_chunks(self) -> int:
        """The chunks of layers on each stage; 1 without a pipeline."""
        return self.chunks or 1

    def schedule_of(self, microbatches: int) -> Schedule:
        """The schedule of the pipeline for so many microbatches; raises where the schedule does not allow them."""
        assert self.schedule is not None, "there are stages"
        return make_schedule(self.schedule, self.stages, microbatches, self.num_chunks)

    @cached_property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes that split the storage of params and optimizer state, but not the computation of a layer."""
        return tuple(axis for axis in (FSDP, PIPE) if self.size(axis) > 1)

    @property
    def storage_parts(self) -> int:
        return math.prod(self.size(axis) for axis in self.storage_axes)

    @property
    def tensor(self) -> TensorParallel | None:
        size = self.size(TENSOR)
        return TensorParallel(TENSOR, size, self.sequence_parallel) if size > 1 else None

    @property
    def experts(self) -> ExpertParallel | None:
        size = self.size(EXPERT)
        return ExpertParallel(EXPERT, size) if size > 1 else None

    @property
    def batch_spec(self) -> PartitionSpec:
        """Every array of a batch is split along its first dim."""
        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    def check_has_no_stages(self, what: str) -> None:
        """Raise if there is a pipeline; `what` is the caller, for the message."""
        if self.stages > 1:
            raise ValueError(
                f"{what} runs whole models, and has no pipeline, got {describe_mesh(self.mesh)}; leave out the axis "
                "pipe, or call a step of make_train_step, which has one"
            )

    def check_rows(self, batch: Batch, microbatches: int) -> None:
        """Raise unless every device gets the same number of rows of each microbatch. A leaf that is no `jax.Array` is
        this process's part of the batch.
        """
        of_each = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            processes = 1 if isinstance(leaf, jax.Array) else jax.process_count()
            rows, parts = np.shape(leaf)[:1], max(self.batch_parts // processes, 1) * microbatches
            if rows and rows[0] % parts:
                raise ValueError(
                    f"every device must have as many rows{of_each}: {self.batch_parts} parts of a batch on the mesh "
                    f"{describe_mesh(self.mesh)}, got {rows[0]} rows of batch{jax.tree_util.keystr(path)}; "
                    f"pass a multiple of {parts}"
                )

    def place_batch(self, batch: Batch, microbatches: int) -> Batch:
        """The batch on the mesh. A leaf that is no `jax.Array` is this process's part of it."""
        self.check_rows(batch, microbatches)

        def place(leaf: ArrayLike) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return leaf if leaf.sharding.device_set == self.devices else jax.device_put(leaf, self._sharding(leaf))
            return jax.make_array_from_process_local_data(self._sharding(leaf), np.asarray(leaf))

        return jax.tree.map(place, batch)

    @cached_property
    def devices(self) -> set[object]:
        return set(self.mesh.devices.flat)

    def _sharding(self, leaf: ArrayLike) -> NamedSharding:
        return NamedSharding(self.mesh, self.batch_spec if np.ndim(leaf) else PartitionSpec())


def as_parallelism(parallel: object) -> Parallelism | None:
    """Check the argument `parallel` of a user: a `Parallelism`, None, or a mesh, which gets the defaults."""
    if isinstance(parallel, Mesh):
        return Parallelism(parallel)
    if parallel is None or isinstance(parallel, Parallelism):
        return parallel
    raise ValueError(
        f"parallel must be a jax.sharding.Mesh or a Parallelism, got {describe(parallel)}; "
        'make a mesh with jax.make_mesh((4,), ("data",)), and pass it, or fp8.Parallelism(mesh, ...) with options'
    )


def check_mesh(mesh: object) -> None:
    """Raise unless a step can be spread over this mesh."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f'mesh must be a jax.sharding.Mesh, got {describe(mesh)}; make one with jax.make_mesh((4,), ("data",))'
        )
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(
            f"a mesh may have the axes {', '.join(AXES)}, got {describe_mesh(mesh)}; "
            f"rename or drop {', '.join(unknown)}"
        )


def parse_axes(text: str) -> dict[str, int]:
    """`data=2,tensor=4` → the size of each axis, in the order of AXES: devices of the last axis adjoin."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in pairs if name in AXES and size.isdecimal() and int(size) > 0}
    if len(sizes) != len(pairs):
        raise ValueError(
            f"a mesh must be axes among {', '.join(AXES)}, each once and with a size of at least 1, got {text!r}; "
            "say data=2,tensor=4"
        )
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def describe_mesh(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def _check_rules(rules: object) -> None:
    is_rule = [
        isinstance(rule, tuple) and len(rule) == 2 and _is_pattern(rule[0]) and isinstance(rule[1], PartitionSpec)
        for rule in (rules if isinstance(rules, tuple | list) else [None])
    ]
    if not all(is_rule):
        raise ValueError(
            "rules must be pairs of a pattern and a PartitionSpec, "
            f'got {describe(rules)}; pass [("mlp/up/kernel", P(None, "tensor"))]'
        )


def _is_pattern(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(re.compile(text))
    except re.error:
        return False


def _check_gradient_dtype(gradient_dtype: Any) -> np.dtype | None:
    """The dtype that the argument names; raises unless gradients can be summed in it."""
    try:
        dtype = None if gradient_dtype is None else jnp.dtype(gradient_dtype)
    except TypeError:
        dtype = gradient_dtype
    if gradient_dtype is not None and getattr(dtype, "name", None) not in GRADIENT_DTYPES:
        raise ValueError(
            f"gradient_dtype must be None, jnp.float32 or jnp.bfloat16, got {gradient_dtype!r}; "
            "None sums them in float32, unless gradients and params have 16 bits"
        )
    return dtype
