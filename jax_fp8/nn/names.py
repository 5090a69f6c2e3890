"""Names of the dims of params, as Flax's metadata: for whoever places params by such names.

A layer with `logical_axes=True` puts what it initializes into boxes (`nn.LogicallyPartitioned`), from which
`nn.get_partition_spec` reads the names. Where params are arrays without boxes, layers work alike.

    embed       the width of the residual stream where a layer reads it: rows of a kernel
    residual    the same where a layer writes it: columns of a kernel or of a table
    heads       query heads, one after the other; rows of the kernel that takes what was attended to
    kv_heads    heads of keys and of values
    head_dim    features of a head: of the norms of queries and keys
    mlp         hidden features
    expert      experts, of a mixture
    vocab       tokens of the vocabulary
    positions   of a sequence
    norm        vectors as wide as the residual stream: of norms, and biases of what is added to it
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core.meta import AxisMetadata

from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding

Names = tuple[str, ...]


def names_of_linear(sharding: ParamSharding) -> tuple[Names | None, Names | None]:
    """Names of the dims of kernel and bias, from the kernel's sharding; None where nobody has said what they are."""
    own = sharding.logical_name
    of_dims = {COLUMNS: (("embed", own), (own,)), ROWS: ((own, "residual"), ("norm",))}
    return of_dims[sharding.dim] if sharding.dim is not None else (None, None)


def named(init: Callable, names: Names | None, is_wanted: bool) -> Callable:
    """An initializer whose arrays carry the names of their dims, if that is wanted and it does not name them itself."""
    if not is_wanted or names is None:
        return init

    def boxed(*args: Any) -> Any:
        made = init(*args)
        return made if isinstance(made, AxisMetadata) else nn.LogicallyPartitioned(made, names)  # type: ignore

    return boxed
