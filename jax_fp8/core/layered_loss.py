"""A loss in pieces, as a pipeline needs it: a first piece, the layers one by one, and a last piece.

    variables, batch ─first→ x ─layer "layer_0"→ x ─layer "layer_1"→ ... x ─last→ loss

A pipeline gives each stage some of the layers. The first and the last piece are computed by all stages, each of which
takes some of the microbatches, whole ones.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jax_fp8.core.types import Batch, PyTree, Variables


@dataclass(frozen=True)
class LayeredLoss:
    """A loss in pieces, with layers that a pipeline gives to its stages; called as `loss_fn(variables, batch)`.

    The variables of all layers have the same structure, shapes and dtypes. `fp8.next_token_loss(GPT(...))` is such a
    loss.

    Args:
      layers: the names of the layers, in order. Each is a key of every collection in which the layers have variables.
      first: `first(variables, batch) -> x`, an array of one microbatch. It and `last` read no variables of the layers.
      layer: `layer(variables, x, name) -> x`, of the same shape and dtype. `variables` hold the collections with this
        layer's entry alone.
      last: `last(variables, x, batch) -> loss`, the mean loss of the microbatch, a scalar.
      whole: the same loss as one function, `whole(variables, batch)`, which may take more, such as rngs; None composes
        it of the pieces.
      on_host: the layers with residuals in the host's memory (core/checkpoint_names.py). Gradients are then computed
        layer by layer, so that the copies to the host and back have their place in the order.
      whole_batch: as in `WholeBatchLoss`.

    Raises:
      ValueError: when it is called with options such as rngs, if `whole` is None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> loss_fn = fp8.LayeredLoss(
      ...     layers=("layer_0", "layer_1"),
      ...     first=lambda variables, batch: batch,
      ...     layer=lambda variables, x, name: x * variables["params"][name]["weight"],
      ...     last=lambda variables, x, batch: jnp.mean(x),
      ... )
      >>> params = {name: {"weight": jnp.float32(3)} for name in loss_fn.layers}
      >>> loss_fn({"params": params}, jnp.ones(4))
      Array(9., dtype=float32)
    """

    layers: tuple[str, ...]
    first: Callable[[Variables, Batch], PyTree]
    layer: Callable[[Variables, PyTree, str], PyTree]
    last: Callable[[Variables, PyTree, Batch], PyTree]
    whole: Callable[..., PyTree] | None = None
    on_host: tuple[str, ...] = ()
    whole_batch: Callable[[Batch], Batch] | None = None

    def kind_of(self, name: str) -> Hashable:
        """What a layer computes with its variables: equal for layers that compute the same, forward and backward.

        Only `LayersByKind` says so; any other layer is a kind of its own.
        """
        return self.layer.kind_of(name) if isinstance(self.layer, LayersByKind) else name

    def __call__(self, variables: Variables, batch: Batch, **options: object) -> PyTree:
        if self.whole is not None:
            return self.whole(variables, batch, **options)
        if options:
            raise ValueError(
                f"a LayeredLoss without `whole` takes variables and a batch, got {', '.join(options)}; pass whole="
            )
        x = self.first(variables, batch)
        for name in self.layers:
            x = self.layer(of_layer(variables, name), x, name)
        return self.last(variables, x, batch)


@dataclass(frozen=True)
class LayersByKind:
    """The `layer` of a `LayeredLoss` that knows which layers compute the same. A pipeline traces one layer of each kind
    instead of all of them.

    Args:
      apply: `apply(variables, x, name) -> x`, as `layer` of a `LayeredLoss`.
      kind_of: `kind_of(name)`: equal for layers that are one function of their variables and x, forward and backward.
    """

    apply: Callable[[Variables, PyTree, str], PyTree]
    kind_of: Callable[[str], Hashable]

    def __call__(self, variables: Variables, x: PyTree, name: str) -> PyTree:
        return self.apply(variables, x, name)


@dataclass(frozen=True)
class WholeBatchLoss:
    """A loss that needs a fact of the whole batch, such as its number of trained tokens, also for a part of the batch.

    It is called as `loss_fn(variables, batch)`.

    Args:
      loss_fn: the loss. Its batch is the result of `whole_batch` or a part of it, or a batch that was never split.
      whole_batch: `whole_batch(batch) -> batch` adds such facts. A step calls it once, before it splits the batch into
        microbatches, so each array of the result has the rows of the batch. None leaves the batch as it is.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> def add_trained_per_row(batch):
      ...     rows = len(batch["mask"])
      ...     return {**batch, "per_row": jnp.full(rows, jnp.sum(batch["mask"]) / rows)}
      >>> def mean_loss(variables, batch):
      ...     return jnp.sum(batch["mask"] * variables["params"]["loss"]) / jnp.sum(batch["per_row"])
      >>> loss_fn = fp8.WholeBatchLoss(mean_loss, add_trained_per_row)
      >>> batch = loss_fn.whole_batch({"mask": jnp.array([[1, 1], [1, 0]])})
      >>> loss_fn({"params": {"loss": jnp.float32(2)}}, batch)
      Array(2., dtype=float32)
    """

    loss_fn: Callable[..., PyTree]
    whole_batch: Callable[[Batch], Batch] | None

    def __call__(self, variables: Variables, batch: Batch, **options: object) -> PyTree:
        return self.loss_fn(variables, batch, **options)


def of_layer(variables: Variables, name: str) -> dict[str, PyTree]:
    """The variables of one layer, in the collections that have any."""
    return {collection: {name: tree[name]} for collection, tree in variables.items() if name in tree}
