"""Where an operation runs: the kernel on CUDA, the `jnp` reference elsewhere, and on what shard.

An op has an einsum-like rule of its arrays, empty for scalars: "m k, n k, , -> m n". Kernel and reference take the
local arrays and `split`, the mesh axes that split each dim of the rule. They do the collectives that follow themselves:
with {"k": ("data",)} they sum their partial products over "data".

One rule serves three kinds of mesh axes. Auto: the compiler chooses shardings, and asks `custom_partitioning` how the
kernel follows them (it partitions the reference, plain `jnp`, by itself). Explicit: operands carry their shardings in
their types, and a `shard_map` runs the op on shards. Manual, inside a user's own `shard_map`: the arrays are shards
already. For a custom call without such a rule the compiler would gather the whole array first.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.custom_batching
from jax import lax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from jax_fp8.core.shards import largest_amax
from jax_fp8.core.types import PyTree
from jax_fp8.kernels import extension
from jax_fp8.kernels.explicit import (
    AnyMesh,
    Dims,
    Split,
    check_tiles,
    collect,
    elements,
    explicit_mesh,
    explicit_spec,
    parse_rule,
    place,
    spec_of,
)
from jax_fp8.kernels.hashable_partial import hashable, is_hashable
from jax_fp8.kernels.partial_results import PartialResult
from jax_fp8.kernels.vma import vary, varying_axes


def dispatch(
    rule: str, kernel: Callable | None, reference: Callable, *args: jax.Array, part: PartialResult | None = None
) -> tuple[jax.Array, ...]:
    """Run `kernel(*args, split=...)` where CUDA kernels run and `reference(*args, split=...)` elsewhere;
    both return a tuple.

    Args:
      kernel: None where there is no kernel: the reference then runs on CUDA too, and a warning says so once.
      part: a dim of results that devices may compute in parts.
    """
    inputs, outputs = parse_rule(rule)
    mesh = explicit_mesh(*args)
    split = collect(inputs, outputs, [explicit_spec(arg) for arg in args])
    if part is not None and mesh is not None and part.can_be(mesh, part.axes, split):
        split[part.dim] = part.axes
    operation = Operation(rule, kernel and hashable(kernel), hashable(reference), part)
    traced, on_shards = _traced_once, _traced_once_on_shards
    if not is_hashable(operation):
        traced, on_shards = traced.__wrapped__, on_shards.__wrapped__
    if mesh is not None and (split or AxisType.Auto not in mesh.axis_types):
        check_tiles(mesh, inputs, split, [arg.shape for arg in args])
        return on_shards(operation, mesh, tuple(split.items()))(*_placed(mesh, inputs, split, args))
    return (traced(operation) if any(isinstance(arg, Tracer) for arg in args) else operation)(*args)


@dataclass(frozen=True)
class Operation:
    """Kernel and reference of an op. `dispatch` calls it, or `on_shard` where Explicit axes split its arrays."""

    rule: str
    kernel: Callable | None
    reference: Callable
    part: PartialResult | None

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        local = self.kernel and _auto_partitioned(self.kernel, self.rule, self.part)
        return _on_platform(local, functools.partial(self.reference, split={}), *args)

    def on_shard(self, split: Split, *args: jax.Array) -> tuple[jax.Array, ...]:
        # As on Auto axes: under `vmap` a kernel is one call after the other.
        local = self.kernel and jax.custom_batching.sequential_vmap(functools.partial(self.kernel, split=split))
        return _on_platform(local, functools.partial(self.reference, split=split), *args)


# A model repeats operations of the same shapes, and each is traced as kernel and as reference. Cached functions let jax
# find these traces again.


@functools.lru_cache(maxsize=4096)
def _traced_once(operation: Operation) -> Callable:
    """The operation under a jit that is inlined, so that the traced program is the same as without it."""
    return jax.jit(lambda *args: operation(*args), inline=True)


@functools.lru_cache(maxsize=4096)
def _traced_once_on_shards(
    operation: Operation, mesh: AnyMesh, split: tuple[tuple[str, tuple[str, ...]], ...]
) -> Callable:
    """The operation on the shards of an Explicit mesh that splits arrays by `split`."""
    return _mapped(mesh, *parse_rule(operation.rule), dict(split), functools.partial(operation.on_shard, dict(split)))


def on_shards(
    mesh: AnyMesh, inputs: Dims, outputs: Dims, split: Split, local: Callable, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """Run `local` on the shards of an Explicit mesh, whose axes split the dims of arrays by `split`."""
    return _mapped(mesh, inputs, outputs, split, local)(*_placed(mesh, inputs, split, args))


def _placed(mesh: AnyMesh, inputs: Dims, split: Split, args: Sequence[jax.Array]) -> list[jax.Array]:
    return [place(mesh, arg, spec_of(dims, split)) for dims, arg in zip(inputs, args, strict=True)]


def _mapped(mesh: AnyMesh, inputs: Dims, outputs: Dims, split: Split, local: Callable) -> Callable:
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(spec_of(dims, split) for dims in inputs),
        out_specs=tuple(spec_of(dims, split) for dims in outputs),
        axis_names={
            axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
        },
        check_vma=False,
    )
    return jax.jit(mapped)  # outside jit, a shard_map over some axes of a mesh does not run


def pmax(x: jax.Array, split: Split, *dims: str) -> jax.Array:
    """The maximum of an amax over the shards that split any of the dims; NaN if one is NaN."""
    return largest_amax(x, split_axes(split, *dims))


def psum(x: jax.Array, split: Split, *dims: str) -> jax.Array:
    """The sum over the shards that split any of the dims."""
    axes = split_axes(split, *dims)
    return lax.psum(x, axes) if axes else x


def gathered(x: jax.Array, split: Split, *dims: str) -> jax.Array:
    """The whole array, gathered over the shards that split any of its first dims, `dims`."""
    for position, dim in enumerate(map(elements, dims)):
        if split.get(dim):
            x = lax.all_gather(x, split[dim], axis=position, tiled=True)
    return x


def split_axes(split: Split, *dims: str) -> tuple[str, ...]:
    """The mesh axes that split any of the dims, each once."""
    return tuple(dict.fromkeys(axis for dim in dims for axis in split.get(dim, ())))


def _on_platform(kernel: Callable | None, reference: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    def bounded(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Barriers round operands and results to their dtypes, as a kernel does. Fused with its neighbours, a
        # reference would read and return more bits than its dtypes have.
        return lax.optimization_barrier(reference(*lax.optimization_barrier(operands)))

    if kernel is None and jax.default_backend() == "gpu":
        _warn_of_reference()
    on_cuda = kernel if kernel is not None and kernels_run() else bounded
    axes = varying_axes(args)
    forms = (lambda *operands, form=form: vary(form(*operands), axes) for form in (on_cuda, bounded))
    on_cuda, elsewhere = forms
    return lax.platform_dependent(*args, cuda=on_cuda, default=elsewhere)


@functools.cache
def _warn_of_reference() -> None:
    warnings.warn(
        "scales by tile run on the slow jnp reference: kernels know E4M3 with tiles of 1 x 128 and of 128 x 128; "
        "use BlockScaling, or a recipe with one scale a tensor",
        stacklevel=2,
    )


@functools.cache
def kernels_run() -> bool:
    """Whether a program for CUDA calls the kernels.

    Warns once where a GPU is present and they cannot run: training would be very slow without a reason to see. Raises
    where kernels are installed for this GPU and cannot be loaded.
    """
    reason = extension.missing_reason() or too_old_gpu()
    if reason and jax.default_backend() == "gpu":
        if extension.is_broken():
            raise RuntimeError(f"FP8 on this GPU needs the CUDA kernels: {reason}")
        warnings.warn(f"FP8 runs on the slow jnp reference: {reason}", stacklevel=2)
    return reason is None


def too_old_gpu() -> str | None:
    """Why this machine's GPU cannot run the kernels, in one sentence; None where it can, or where there is none."""
    if jax.default_backend() != "gpu":
        return None  # compiling for another machine's GPU, assumed to be a current one
    capability = jax.devices()[0].compute_capability
    if float(capability) >= 8.9:
        return None
    return (
        f"FP8 kernels need compute capability 8.9 or newer, this GPU has {capability}; use recipe=None (bfloat16) here"
    )


def _auto_partitioned(kernel: Callable, rule: str, part: PartialResult | None) -> Callable:
    inputs, outputs = parse_rule(rule)

    def partition(mesh: AnyMesh, arg_shapes: PyTree, result_shapes: PyTree) -> tuple:
        split = collect(inputs, outputs, [arg.sharding.spec for arg in arg_shapes])
        if part is not None:
            wanted = collect(outputs, [], [result.sharding.spec for result in result_shapes]).get(part.dim, ())
            split |= {part.dim: wanted} if part.can_be(mesh, wanted, split) else {}

        def shardings(arrays: Dims) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec_of(dims, split)) for dims in arrays)

        return mesh, functools.partial(kernel, split=split), shardings(outputs), shardings(inputs)

    def unsplit(*args: jax.Array) -> tuple[jax.Array, ...]:
        return kernel(*args, split={})

    op = custom_partitioning(unsplit)
    op.def_partition(partition=partition, sharding_rule=_shardy_rule(inputs, outputs))
    # custom_partitioning has no batching rule: under `vmap` the calls run one after the other.
    return jax.custom_batching.sequential_vmap(op)


def _shardy_rule(inputs: Dims, outputs: Dims) -> str:
    """The rule in Shardy's syntax: nothing between commas for a scalar; tiles are a dim of their own."""
    rule = " -> ".join(", ".join(" ".join(dims) for dims in arrays) for arrays in (inputs, outputs))
    return rule.replace("/", "")
