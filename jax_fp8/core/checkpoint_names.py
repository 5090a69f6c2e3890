"""Names for the residuals of a layer, and a checkpoint policy that offloads them to the host's pinned memory.

    forward ─name_residual(name, x)→ x, for the backward ─nn.remat(policy=offload_policy())→ copies

The names change nothing by themselves. Under the policy, a named residual leaves the device as soon as it is computed,
and comes back when the backward of its layer begins, with the same dtype, layout and bits. All other residuals stay on
the device: scales, the statistics of norms, weights, the result of attention, and all without a name. Nothing is
computed again. grads/by_layer.py, which knows the layers of a loss, decides when the copies run.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

Arrays = TypeVar("Arrays")  # one array, or a tree of them

# In the order in which a layer makes them. Bytes are per token, of a model of width h with an MLP of width 4 h.
RESIDUAL_NAMES = (
    "norm_input",  # 2 h bfloat16, of each of two norms
    "gemm_input",  # h FP8, of each of three GEMMs
    "attention_operands",  # 6 h bfloat16: queries, keys and values
    "mlp_hidden",  # 8 h bfloat16: the input of the activation
)


def name_residual(name: str, x: Arrays) -> Arrays:
    """The same arrays, under a name of RESIDUAL_NAMES."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _full(name)), x)


def offload_policy(names: Collection[str] = RESIDUAL_NAMES) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` and `nn.remat`: residuals of these names wait on the host, others on the device."""
    unknown = sorted({*names} - {*RESIDUAL_NAMES})
    if unknown or isinstance(names, str):
        raise ValueError(
            f"names must be some of {', '.join(RESIDUAL_NAMES)}, got {names!r}; leave out what is none of them"
        )
    offloaded = {_full(name) for name in names}
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Primitive, *args: object, **params: object) -> Any:
        return offload(primitive, *args, **params) if params.get("name") in offloaded else True

    return policy


def _full(name: str) -> str:
    return f"jax_fp8 {name}"
