"""A loss by its layers, as a pipeline takes it: what comes before them, the layers one by one, what comes after them.

    variables, batch ─first→ x ─layer "layer_0"→ x ─layer "layer_1"→ ... x ─last→ loss

A pipeline gives each stage some of the layers. What comes before and after them is spread over all stages by
microbatches, and sees whole ones.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayeredLoss:
    """`loss_fn(variables, batch)`, made of layers that are alike. `fp8.next_token_loss(GPT(...))` is one.

    Args:
      layers: their names, in order: each is a key of every collection that the layers have variables in. Their
        variables have the same structure, shapes and dtypes.
      first: `first(variables, batch) -> x`, an array of one microbatch. It and `last` read no variables of the layers.
      layer: `layer(variables, x, name) -> x`, of the same shape and dtype. `variables` hold the collections with this
        layer's entry alone.
      last: `last(variables, x, batch) -> loss`, the mean loss of the microbatch, a scalar.
      whole: the same loss in one, `whole(variables, batch)`, which may take more, such as rngs; None composes it of the
        pieces.
      on_host: the layers that keep something in the host's memory (core/checkpoint_names.py): their gradients are
        computed layer by layer, so that copies there and back have their place in the order.
      whole_batch: as of a `WholeBatchLoss`, or None.
    """

    layers: tuple[str, ...]
    first: Callable[[Mapping, Any], Any]
    layer: Callable[[Mapping, Any, str], Any]
    last: Callable[[Mapping, Any, Any], Any]
    whole: Callable[[Mapping, Any], Any] | None = None
    on_host: tuple[str, ...] = ()
    whole_batch: Callable[[Any], Any] | None = None

    def kind_of(self, name: str) -> Hashable:
        """What a layer computes with its variables: equal for layers that compute the same, forward and backward. Only
        `LayersByKind` says so; any other layer is a kind of its own.
        """
        return self.layer.kind_of(name) if isinstance(self.layer, LayersByKind) else name

    def __call__(self, variables: Mapping, batch: Any, **options: Any) -> Any:
        if self.whole is not None:
            return self.whole(variables, batch, **options)
        if options:
            raise ValueError(
                f"a loss by its layers takes variables and a batch, got {', '.join(options)}; give it whole"
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

    apply: Callable[[Mapping, Any, str], Any]
    kind_of: Callable[[str], Hashable]

    def __call__(self, variables: Mapping, x: Any, name: str) -> Any:
        return self.apply(variables, x, name)


@dataclass(frozen=True)
class WholeBatchLoss:
    """`loss_fn(variables, batch)` that must know of the whole batch what a part of it does not show, such as how many
    of its tokens are learned.

    Args:
      loss_fn: the loss; it takes what `whole_batch` returns, parts of it, and batches that were never split.
      whole_batch: `whole_batch(batch) -> batch`, which a step calls once, before it splits the batch into microbatches.
        Each array that it returns has the rows of the batch. None leaves the batch as it is.
    """

    loss_fn: Callable
    whole_batch: Callable[[Any], Any] | None

    def __call__(self, variables: Mapping, batch: Any, **options: Any) -> Any:
        return self.loss_fn(variables, batch, **options)


def of_layer(variables: Mapping, name: str) -> dict:
    """The variables of one layer, where they are."""
    return {collection: {name: tree[name]} for collection, tree in variables.items() if name in tree}
