"""What the backward keeps of a layer, by name, and where it waits: on the device, or in the host's pinned memory.

    forward ─name_residual(name, x)→ x, for the backward ─nn.remat(policy=offload_policy())→ copies

The names change nothing by themselves. Under the policy, what has one of them leaves the device as soon as it is there,
and comes back when the backward of its layer begins; dtype, layout and bits are the same. All else stays: scales, the
statistics of norms, weights, what attention returns, and whatever has no name. Nothing is computed again. Who knows the
layers of a loss can say when the copies run: grads/by_layer.py.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# In the order in which a layer makes them. The bytes are those of a token, where the model is h wide and its MLP 4 h.
RESIDUAL_NAMES = (
    "norm_input",  # 2 h bfloat16, of each of two norms
    "gemm_input",  # h FP8, of each of three GEMMs
    "attention_operands",  # 6 h bfloat16: queries, keys and values
    "mlp_hidden",  # 8 h bfloat16: what the activation reads
)


def name_residual(name: str, x: Any) -> Any:
    """The same arrays, by a name of RESIDUAL_NAMES."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _full(name)), x)


def offload_policy(names: Collection[str] = RESIDUAL_NAMES) -> Any:
    """Of `jax.checkpoint` and `nn.remat`: what has one of these names waits on the host, and all else on the device."""
    unknown = sorted({*names} - {*RESIDUAL_NAMES})
    if unknown or isinstance(names, str):
        raise ValueError(
            f"names must be some of {', '.join(RESIDUAL_NAMES)}, got {names!r}; leave out what is none of them"
        )
    offloaded = {_full(name) for name in names}
    of_names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive, *args, **params):
        return of_names(primitive, *args, **params) if params.get("name") in offloaded else True

    return policy


def _full(name: str) -> str:
    return f"jax_fp8 {name}"
