"""The end of a branch of a Transformer layer: what attention or an MLP returns is normalized, scaled, dropped from, and
added to the residual stream. A layer without any of these lets its last GEMM add the residual instead.

    x + multiplier * dropout(norm(branch))
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_number
from jax_fp8.nn.checks import layer_name
from jax_fp8.nn.dense import NormVariables
from jax_fp8.nn.dropout import drop, drops
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.ops.unfused import apply_norm

PLACEMENTS = ("before", "after", "both")


def check_branch(module: nn.Module) -> None:
    """Raise unless the fields `norm`, `norm_placement` and `residual_multiplier` of a layer are valid together."""
    fields = vars(module)
    placement, norm = fields["norm_placement"], fields["norm"]
    if placement not in PLACEMENTS:
        raise ValueError(
            f"{layer_name(module)}: norm_placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}"
        )
    if norm is None and placement != "before":
        raise ValueError(
            f"{layer_name(module)}: norm_placement={placement!r} needs a norm, got norm=None; give one, or leave "
            "norm_placement out"
        )
    check_number(f"{layer_name(module)}: residual_multiplier", fields["residual_multiplier"], "", lambda _: True)


def norm_before(module: nn.Module) -> str | None:
    """The norm at the beginning of the branch, or None."""
    fields = vars(module)
    return None if fields["norm_placement"] == "after" else fields["norm"]


def ends_in_gemm(module: nn.Module, deterministic: bool | None) -> bool:
    """Whether the last GEMM of a branch is its end, so that it may add the residual."""
    fields = vars(module)
    is_plain = fields["norm_placement"] == "before" and fields["residual_multiplier"] == 1
    return is_plain and not drops(module, deterministic)


def end_branch(
    module: nn.Module, branch: jax.Array, residual: jax.Array | None, deterministic: bool | None
) -> jax.Array:
    """Normalize, scale and drop from a branch (..., width), as the fields of its layer say, and add `residual`."""
    fields = vars(module)
    if fields["norm_placement"] != "before":
        norm = NormVariables(**shared_fields(module, NormVariables), name="post_norm")(branch.shape[-1])
        branch = apply_norm(branch, norm, fields["epsilon"], fields["dtype"])
    if fields["residual_multiplier"] != 1:
        branch = (branch.astype(jnp.float32) * fields["residual_multiplier"]).astype(branch.dtype)
    if drops(module, deterministic):
        return drop(module, branch, fields["dropout_rate"], residual)
    return branch if residual is None else branch + residual.astype(branch.dtype)
