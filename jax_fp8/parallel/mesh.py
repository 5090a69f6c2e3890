"""The axes of a mesh, by name.

    data     splits the batch; params are the same on all its devices
    fsdp     splits the batch too, and params, gradients and optimizer state (ZeRO: https://arxiv.org/abs/1910.02054)
    tensor   splits layers; the batch is the same on all its devices
    pipe     each of its devices computes some of the layers, one microbatch after the other; params lie split over it,
             as over `fsdp`

Any of them may be left out, or be 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8.core.checks import check_bool, describe
from jax_fp8.core.shards import TensorParallel

PIPE, DATA, FSDP, TENSOR = "pipe", "data", "fsdp", "tensor"
AXES = (PIPE, DATA, FSDP, TENSOR)
Rules = Sequence[tuple[str, PartitionSpec]]
GRADIENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Parallelism:
    """How a step is spread over a mesh.

    Args:
      mesh: its axes are among AXES.
      rules: a pattern and a `PartitionSpec` each: params whose path, names joined by "/", the pattern is found in
        (`re.search`) are split like that; the spec is that of their last dims. The first that is found counts, and
        layers and sizes decide for all others.
      sequence: sequence parallelism: between layers, devices of `tensor` keep a part of the rows each.
      gradient_dtype: in which gradients are summed over `data` and `fsdp`; None: float32, unless
        both gradients and params have 16 bits.
      schedule: of the pipeline, by its name in parallel/schedules.py.
      chunks: of layers that each stage of the pipeline has.
    """

    mesh: Mesh
    rules: Rules = ()
    sequence: bool = False
    gradient_dtype: Any = None
    schedule: str = "1f1b"
    chunks: int = 1

    @classmethod
    def of(
        cls,
        mesh: Mesh | None,
        rules: Rules = (),
        sequence_parallel: bool = False,
        gradient_dtype: Any = None,
        schedule: str | None = None,
        chunks: int | None = None,
    ) -> "Parallelism | None":
        """What a user says of a mesh, or of none."""
        if mesh is None:
            if rules or sequence_parallel or any(given is not None for given in (gradient_dtype, schedule, chunks)):
                raise ValueError(
                    "rules, sequence_parallel, gradient_dtype, schedule and chunks are about a mesh, got none; "
                    "pass mesh=jax.make_mesh(...)"
                )
            return None
        how = cls(mesh, tuple(rules), sequence_parallel, gradient_dtype)
        if how.stages == 1 and (schedule is not None or chunks is not None):
            raise ValueError(
                f"schedule and chunks are about the axis `pipe`, which this mesh has not, got {describe_mesh(mesh)}; "
                "add the axis, or leave them out"
            )
        schedule = "1f1b" if schedule is None else schedule
        if chunks is None:
            chunks = 2 if schedule == "interleaved" else 1
        return replace(how, schedule=schedule, chunks=chunks)

    def __post_init__(self):
        check_mesh(self.mesh)
        _check_rules(self.rules)
        check_bool("sequence_parallel", self.sequence)
        if self.gradient_dtype is not None and jnp.dtype(self.gradient_dtype).name not in GRADIENT_DTYPES:
            raise ValueError(
                f"gradient_dtype must be None, jnp.float32 or jnp.bfloat16, got {self.gradient_dtype!r}; "
                "None sums them in float32, unless gradients and params have 16 bits"
            )
        if self.sequence and self.size(TENSOR) == 1:
            raise ValueError(
                "sequence parallelism splits rows over the axis `tensor`, which this mesh has not, "
                f"got {describe_mesh(self.mesh)}; add the axis, or leave sequence_parallel out"
            )

    def size(self, axis: str) -> int:
        """Devices along an axis; 1 where the mesh has none."""
        return dict(self.mesh.shape).get(axis, 1)

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Those that split the batch."""
        return tuple(axis for axis in (DATA, FSDP) if self.size(axis) > 1)

    @property
    def batch_parts(self) -> int:
        return math.prod(self.size(axis) for axis in self.batch_axes)

    @property
    def stages(self) -> int:
        """Of the pipeline; 1 is none."""
        return self.size(PIPE)

    @cached_property
    def storage_axes(self) -> tuple[str, ...]:
        """Those that split params and optimizer state, but not what a layer computes."""
        return tuple(axis for axis in (FSDP, PIPE) if self.size(axis) > 1)

    @property
    def storage_parts(self) -> int:
        return math.prod(self.size(axis) for axis in self.storage_axes)

    @property
    def tensor(self) -> TensorParallel | None:
        size = self.size(TENSOR)
        return TensorParallel(TENSOR, size, self.sequence) if size > 1 else None

    @property
    def batch_spec(self) -> PartitionSpec:
        """How every array of a batch is split: by its first dim."""
        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    def check_has_no_stages(self, what: str) -> None:
        """Raise where there are stages."""
        if self.stages > 1:
            raise ValueError(
                f"{what} runs whole models, and has no pipeline, got {describe_mesh(self.mesh)}; leave out the axis "
                "pipe, or call a step of make_train_step, which has one"
            )

    def check_rows(self, batch: Any, microbatches: int) -> None:
        """Raise unless every device has as many whole rows of each microbatch. What is not a jax array yet is this
        process's part of the batch.
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

    def place_batch(self, batch: Any, microbatches: int) -> Any:
        """A batch on the mesh. What is not a jax array yet is this process's part of it."""
        self.check_rows(batch, microbatches)

        def place(leaf):
            if isinstance(leaf, jax.Array):
                return leaf if leaf.sharding.device_set == self.devices else jax.device_put(leaf, self._sharding(leaf))
            return jax.make_array_from_process_local_data(self._sharding(leaf), np.asarray(leaf))

        return jax.tree.map(place, batch)

    @cached_property
    def devices(self) -> set[Any]:
        return set(self.mesh.devices.flat)

    def _sharding(self, leaf) -> NamedSharding:
        return NamedSharding(self.mesh, self.batch_spec if np.ndim(leaf) else PartitionSpec())


def check_mesh(mesh: Any) -> None:
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
    """`data=2,tensor=4` → the size of each axis, in the order of AXES: devices of the last one adjoin."""
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


def _check_rules(rules):
    is_rule = [
        isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str) and isinstance(rule[1], PartitionSpec)
        for rule in (rules if isinstance(rules, tuple | list) else [None])
    ]
    if not all(is_rule):
        raise ValueError(
            "rules must be pairs of a pattern and a PartitionSpec, "
            f'got {describe(rules)}; pass [("mlp/up/kernel", P(None, "tensor"))]'
        )
