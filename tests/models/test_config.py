"""Shapes of GPTs: known ones have the size that their names say, and what cannot be is refused."""

import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.models.config import PRESETS


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-124m", 124), ("gpt3-1.3b", 1315), ("gpt3-6.7b", 6658), ("gpt-1t", 1_008_000)]
)
def test_presets_have_their_size(name, millions):
    def size(num_layers):
        model = fp8.GPT(fp8.GPTConfig.preset(name, num_layers=num_layers))
        params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32))["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    of_a_layer = size(2) - size(1)  # all are alike, and there are up to 128 of them
    total = size(1) + (fp8.GPTConfig.preset(name).num_layers - 1) * of_a_layer
    assert total == pytest.approx(millions * 1e6, rel=0.01)


def test_a_preset_with_another_field():
    known = fp8.GPTConfig.preset("gpt2-124m")
    assert known == PRESETS["gpt2-124m"] and known.num_layers == 12
    assert fp8.GPTConfig.preset("gpt2-124m", num_layers=3) != known


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown preset 'gpt5'; choose one of tiny"):
        fp8.GPTConfig.preset("gpt5")
    with pytest.raises(ValueError, match="num_heads must divide hidden_size"):
        fp8.GPTConfig.preset("tiny", num_heads=3)
    with pytest.raises(ValueError, match="positions must be"):
        fp8.GPTConfig.preset("tiny", positions="alibi")
