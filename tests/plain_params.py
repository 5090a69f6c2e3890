"""Params of a `GPT` as the plain Flax models of benchmarks/ name them."""

import jax.numpy as jnp


def as_plain(params):
    """Our params, renamed as in the baseline."""
    plain = {name: params[name] for name in ("embedding", "head", "final_norm") if name in params}
    for number in range(sum(name.startswith("layer_") for name in params)):
        attention, mlp = params[f"layer_{number}"]["attention"], params[f"layer_{number}"]["mlp"]
        plain[f"block_{number}"] = {
            "attention_norm": attention["norm"],
            "attention_out": attention["out"],
            "qkv": {"kernel": jnp.hstack([attention[name]["kernel"] for name in ("query", "key", "value")])},
            "mlp_norm": mlp["norm"],
            "gate_up": {"kernel": jnp.hstack([mlp[name]["kernel"] for name in ("gate", "up")])},
            "down": mlp["down"],
        }
    return plain
