"""The value that says which layers have adapters."""

import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8


def test_scaling_and_targets():
    assert fp8.Lora(rank=4).scaling == 1 and fp8.Lora(rank=4, alpha=8).scaling == 2
    assert fp8.Lora(rank=4).is_for("anything")
    some = fp8.Lora(rank=4, targets=("query",))
    assert some.is_for("query") and not some.is_for("key")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"rank": 0}, "rank must be"),
        ({"rank": 2.0}, "rank must be"),
        ({"rank": 2, "alpha": 0}, "alpha must be"),
        ({"rank": 2, "alpha": float("nan")}, "alpha must be"),
        ({"rank": 2, "targets": "query"}, "targets must be a tuple of names"),
        ({"rank": 2, "targets": (1,)}, "targets must be a tuple of names"),
    ],
)
def test_bad_fields(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        fp8.Lora(**fields)


@pytest.mark.parametrize("layer", [fp8.Dense(32, lora=16), fp8.LayerNormMLP(32, lora={"rank": 4})])
def test_a_layer_takes_a_lora_alone(layer):
    with pytest.raises(ValueError, match=r"lora must be a Lora or None, got .*; pass fp8\.Lora\(rank=16\)"):
        layer.init(jax.random.key(0), jnp.ones((16, 16)))
