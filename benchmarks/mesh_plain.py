"""Plain Flax on a mesh, as a user without this library would train it: params are sharded by hand, XLA does the rest.

    data     params and optimizer state are replicated on every device
    fsdp     each is split along its largest dim that can be split
    tensor   columns of qkv and of the MLP's first matrix, rows of its second one and of the attention's output, rows
             of the vocabulary (https://arxiv.org/abs/1909.08053)

The residual stream and the heads have sharding constraints. Without them, XLA splits the stream along its width, and
cuDNN's attention does not compile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plain_gpt import Constrain, make_plain_step, plain_loss

COLUMNS, ROWS = ("qkv", "mlp_in"), ("attention_out", "mlp_out")


def spec_of(names: tuple[str, ...], shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec:
    """How a param is split, or an optimizer's array of the same shape, whose path ends with the same names."""
    dims: list[str | None] = [None] * len(shape)
    if axes.get("tensor", 1) > 1:
        layer, leaf = ("", "", *names)[-2:]
        if leaf == "embedding" or (layer in ROWS and leaf == "kernel"):
            dims[0] = "tensor"
        elif layer in COLUMNS:
            dims[-1] = "tensor"
    fsdp = axes.get("fsdp", 1)
    if fsdp > 1:
        free = [dim for dim, size in enumerate(shape) if dims[dim] is None and size % fsdp == 0]
        if free:
            dims[max(free, key=lambda dim: shape[dim])] = "fsdp"
    return PartitionSpec(*dims)


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf of params or of a state."""

    def place(path, leaf):
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return NamedSharding(mesh, spec_of(names, leaf.shape, dict(mesh.shape)))

    return jax.tree.map_with_path(place, tree)


def constraint(mesh: Mesh, batch_axes: tuple[str, ...], sequence_parallel: bool) -> Constrain:
    """`constrain(x, kind)` for a `PlainGPT`: splits the batch over its axes, heads over `tensor`, and with sequence
    parallelism the sequence of the residual stream over `tensor`.
    """
    tensor = "tensor" if mesh.shape.get("tensor", 1) > 1 else None
    specs = {
        "residual": PartitionSpec(batch_axes or None, tensor if sequence_parallel else None, None),
        "heads": PartitionSpec(batch_axes or None, None, tensor, None),
    }
    return lambda x, kind: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, specs[kind]))


def build_plain(
    model: nn.Module, tx: optax.GradientTransformation, mesh: Mesh, tokens: Any, microbatches: int, options: dict
) -> tuple[Callable, Callable[[], Any], Any]:
    """The step; a function that makes its state in shards; and the shapes of that state."""

    def create(key):
        variables = dict(model.init(key, tokens))
        return variables, tx.init(variables["params"])

    shapes = jax.eval_shape(create, jax.random.key(1))
    shardings = shardings_of(shapes, mesh)
    out_shardings = (shardings, {"loss": NamedSharding(mesh, PartitionSpec())})
    step = make_plain_step(
        plain_loss(model), tx, microbatches, out_shardings=out_shardings, compiler_options=options or None
    )
    return step, lambda: jax.jit(create, out_shardings=shardings)(jax.random.key(1)), shapes
