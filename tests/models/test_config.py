"""Shapes of GPTs: known ones have the size that their names say, and what cannot be is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.models.config import PRESETS


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-124m", 124),
        ("gpt3-1.3b", 1315),
        ("gpt3-6.7b", 6658),
        ("gpt-1t", 1_008_000),
        ("llama3.1-8b", 8030.261),
        ("llama3.2-1b", 1235.814),
        ("qwen2.5-7b", 7615.617),
        ("qwen3-0.6b", 596.050),
        ("qwen3-8b", 8190.735),
    ],
)
def test_presets_have_their_size(name, millions):
    def size(num_layers):
        model = fp8.GPT(fp8.GPTConfig.preset(name, num_layers=num_layers))
        params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32))["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    of_a_layer = size(2) - size(1)  # all are alike, and there are up to 128 of them
    total = size(1) + (fp8.GPTConfig.preset(name).num_layers - 1) * of_a_layer
    assert total == pytest.approx(millions * 1e6, rel=0.01 if isinstance(millions, int) else 1e-6)


def test_a_preset_with_another_field():
    known = fp8.GPTConfig.preset("gpt2-124m")
    assert known == PRESETS["gpt2-124m"] and known.num_layers == 12
    assert fp8.GPTConfig.preset("gpt2-124m", num_layers=3) != known


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_comes_back_from_json(name):
    config = PRESETS[name]
    described = json.loads(json.dumps(dataclasses.asdict(config)))
    assert fp8.GPTConfig.from_dict(described) == config
    assert described["rotary_scaling"] is None or described["rotary_scaling"]["factor"] in (8.0, 32.0)


def test_an_older_description_has_fewer_fields():
    assert (
        fp8.GPTConfig.from_dict({"vocab_size": 8, "num_layers": 1, "num_heads": 1, "hidden_size": 8}).rotary_base == 1e4
    )
    with pytest.raises(ValueError, match=r"a GPTConfig is made of its fields, activation, .*, got depth, width"):
        fp8.GPTConfig.from_dict({"width": 3, "depth": 4, "vocab_size": 8})
    with pytest.raises(ValueError, match=r"a GPTConfig is made of its fields, .*, got a str"):
        fp8.GPTConfig.from_dict("tiny")
    with pytest.raises(
        TypeError, match="needs vocab_size, num_layers, num_heads, hidden_size, got no num_heads, hidden"
    ):
        fp8.GPTConfig.from_dict({"vocab_size": 8, "num_layers": 1})


def test_heads_are_as_wide_as_they_are_told():
    llama = fp8.GPTConfig.preset("tiny-llama")
    assert (llama.features_of_head, llama.kv_heads) == (32, 2)
    assert fp8.GPTConfig.preset("tiny", head_dim=48).features_of_head == 48
    assert fp8.GPTConfig.preset("tiny").kv_heads == 4


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown preset 'gpt5'; choose one of tiny"):
        fp8.GPTConfig.preset("gpt5")
    with pytest.raises(ValueError, match="num_heads must divide hidden_size"):
        fp8.GPTConfig.preset("tiny", num_heads=3)
    with pytest.raises(TypeError, match=r"a preset takes fields of GPTConfig, activation, .*, got depth, width"):
        fp8.GPTConfig.preset("tiny", width=3, depth=3)
    with pytest.raises(ValueError, match="positions must be"):
        fp8.GPTConfig.preset("tiny", positions="alibi")


SIZES = ("head_dim", "num_heads", "num_kv_heads", "hidden_size", "vocab_size", "max_seq_len", "mlp_hidden_size")


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True], ids=repr)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.versions
def test_what_is_no_size(name, size):
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got {size!r}"):
        fp8.GPTConfig.preset("tiny", **{name: size})


@pytest.mark.parametrize("layers", [-1, 2.0, None], ids=repr)
@pytest.mark.versions
def test_layers(layers):
    with pytest.raises(ValueError, match=f"^num_layers must be an integer of at least 0, got {layers}"):
        fp8.GPTConfig.preset("tiny", num_layers=layers)
    fp8.GPTConfig.preset("tiny", num_layers=np.int64(2))
    fp8.GPTConfig.preset("tiny", num_layers=0)  # an embedding and a head


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got num_kv_heads=3 and num_heads=4"),
        ({"num_kv_heads": 8}, "num_kv_heads must divide num_heads, got num_kv_heads=8 and num_heads=4"),
        ({"norm": "batchnorm"}, "norm must be one of .*, got 'batchnorm'"),
        ({"activation": "tanh"}, "activation must be one of .*, got 'tanh'"),
        ({"use_bias": "no"}, "use_bias must be True or False, got 'no'"),
        ({"tie_embeddings": None}, "tie_embeddings must be True or False, got None"),
        (
            {"positions": "rotary", "num_heads": 128},
            "need an even head_dim, which is hidden_size .* got 1; change one of",
        ),
        ({"positions": "rotary", "head_dim": 7}, "need an even head_dim, .* got 7; change one of them"),
        ({"num_heads": 3}, "num_heads must divide hidden_size, got .*; change one of them, or give head_dim"),
        ({"use_qkv_bias": "no"}, "use_qkv_bias must be True or False, got 'no'"),
        ({"qk_norm": None}, "qk_norm must be True or False, got None"),
        ({"norm_epsilon": -1e-6}, "norm_epsilon must be a finite number that is not negative, got -1e-06"),
        ({"positions": "rotary", "rotary_base": 1.0}, "rotary_base must be a finite number above 1, got 1.0"),
        (
            {"positions": "rotary", "rotary_scaling": 8.0},
            "rotary_scaling must be a RotaryScaling, another scaling or None, got 8.0",
        ),
        ({"rotary_base": 5e5}, "are for rotary positions, got them with positions='learned'; leave them out"),
        ({"rotary_scaling": fp8.RotaryScaling(factor=8.0)}, "are for rotary positions, got them with"),
    ],
)
@pytest.mark.versions
def test_fields_of_a_config(fields, message):
    with pytest.raises(ValueError, match=message):
        fp8.GPTConfig.preset("tiny", **fields)


@pytest.mark.versions
def test_a_preset_is_a_name():
    with pytest.raises(ValueError, match=r"unknown preset \['tiny'\]; choose one of tiny"):
        fp8.GPTConfig.preset(["tiny"])
