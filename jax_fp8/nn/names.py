"""Names of the dims of params, as Flax's metadata, for programs that place params by such names.

A layer with `logical_axes=True` puts the params that it initializes into boxes (`nn.LogicallyPartitioned`), from which
`nn.get_partition_spec` reads the names. Layers take params with or without boxes.

    embed       the width of the residual stream where a layer reads it: rows of a kernel
    residual    the same where a layer writes it: columns of a kernel or of a table
    heads       query heads, one after the other; rows of the kernel that follows attention
    kv_heads    heads of keys and of values
    head_dim    features of a head: of the norms of queries and keys
    mlp         hidden features
    expert      experts, of a mixture
    vocab       tokens of the vocabulary
    positions   of a sequence
    norm        vectors as wide as the residual stream: of norms, and biases of what is added to it
"""

from collections.abc import Callable

import flax.linen as nn
import jax
from flax.core.meta import AxisMetadata
from flax.typing import Initializer

from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding

Names = tuple[str, ...]


def names_of_linear(sharding: ParamSharding) -> tuple[Names | None, Names | None]:
    """Names of the dims of kernel and bias, from the kernel's sharding; None where the layer declares no split."""
    own = sharding.logical_name
    by_dim = {COLUMNS: (("embed", own), (own,)), ROWS: ((own, "residual"), ("norm",))}
    return by_dim[sharding.dim] if sharding.dim is not None else (None, None)


def named(init: Callable[..., jax.Array | AxisMetadata], names: Names | None, is_wanted: bool) -> Initializer:
    """`init` with a box of names around its arrays, where `is_wanted`. A box that `init` makes itself stays."""
    if not is_wanted or names is None:
        return init

    def boxed(key: jax.Array, shape: tuple[int, ...], *dtype: jax.typing.DTypeLike) -> AxisMetadata:
        array = init(key, shape, *dtype)
        return array if isinstance(array, AxisMetadata) else nn.LogicallyPartitioned(array, names)  # type: ignore

    return boxed
