"""The variables of every preset, by path and shape, as `frozen_variables.json` has them:
checkpoints depend on these names.

A change here is a change of a format that people have on disk: it needs a function that loads the older one, as
`from_fused_layout` does, and a line in the changelog. `python tests/adoption/test_variables.py` writes the file anew.
"""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.paths import names_of
from jax_fp8.models.config import PRESETS
from jax_fp8.models.gpt import from_fused_layout

LAYERS = 2
FROZEN = pathlib.Path(__file__).with_name("frozen_variables.json")
LLAMA = {
    "num_kv_heads": 2,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "use_bias": False,
    "tie_embeddings": False,
}
CONFIGS = {**PRESETS, "tiny, as Llama": fp8.GPTConfig.preset("tiny", mlp_hidden_size=256, **LLAMA)}


def shapes_of(config) -> dict:
    """Path → shape of what `init` makes, of a model with a few layers; every one is the first of its kind again."""
    model = fp8.GPT(dataclasses.replace(config, num_layers=LAYERS), recipe=fp8.DelayedScaling(amax_history_len=16))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        collection, *names = names_of(path)
        found["/".join([collection, *names])] = " x ".join(map(str, leaf.shape))
    layers: dict[str, dict] = {}
    for i in range(LAYERS):
        kind = "layer_dense" if i in config.dense_layers else "layer_*"
        own = {
            path.replace(f"layer_{i}/", f"{kind}/"): shape for path, shape in found.items() if f"/layer_{i}/" in path
        }
        assert layers.setdefault(kind, own) == own
    others = {path: shape for path, shape in found.items() if "/layer_" not in path}
    return {"layers": config.num_layers, **others, **layers.get("layer_dense", {}), **layers["layer_*"]}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_variables_are_those_on_disk(name):
    assert shapes_of(CONFIGS[name]) == json.loads(FROZEN.read_text())[name]


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)])
def test_llama_has_as_many_params_as_published(name, billions):
    """Of one layer, embedding, head and final norm; 8.03, 70.6 and 405.9 billion are on the model cards."""
    frozen = json.loads(FROZEN.read_text())[name]
    sizes = {path: math.prod(map(int, shape.split(" x "))) for path, shape in frozen.items() if path != "layers"}
    layer = sum(size for path, size in sizes.items() if path.startswith("params/layer_*/"))
    others = sum(size for path, size in sizes.items() if path.startswith("params/")) - layer
    assert (others + frozen["layers"] * layer) / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_preset_is_frozen():
    assert list(json.loads(FROZEN.read_text())) == list(CONFIGS)


# ---- the layout before that ------------------------------------------------------------------------------------------


def fused(variables, gated):
    """Variables as they were until version 0.1: queries, keys and values one kernel with the norm beside it,
    gate and up another.
    """

    def beside(layer, *names):
        return {leaf: jnp.concatenate([layer[name][leaf] for name in names], axis=-1) for leaf in layer[names[0]]}

    params, fp8_state = dict(variables["params"]), {}
    for name in [name for name in params if name.startswith("layer_")]:
        attention, mlp = params[name]["attention"], params[name]["mlp"]
        qkv = {"norm": attention["norm"], **beside(attention, "query", "key", "value")}
        up = beside(mlp, "gate", "up") if gated else mlp["up"]
        params[name] = {
            "attention": {"qkv": qkv, "out": attention["out"]},
            "mlp": {"norm": mlp["norm"], "up": up, "down": mlp["down"]},
        }
        state = variables["fp8"][name]
        fp8_state[name] = {
            "attention": {"qkv": state["attention"]["query+key+value"], "out": state["attention"]["out"]},
            "mlp": {"up": state["mlp"]["gate+up" if gated else "up"], "down": state["mlp"]["down"]},
        }
    return {"params": params, "fp8": fp8_state}


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["gpt", "llama"])
def test_an_older_layout_loads(options):
    config = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=64, **options)
    model = fp8.GPT(config, recipe=fp8.DelayedScaling(amax_history_len=2))
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, config.vocab_size)
    variables = dict(model.init(jax.random.key(1), tokens))
    old = fused(variables, gated=bool(options))
    assert old["params"]["layer_0"]["attention"]["qkv"]["kernel"].shape == (64, 128 if options else 192)
    loaded = from_fused_layout(old, config)
    assert jax.tree.structure(loaded) == jax.tree.structure(variables)
    jax.tree.map(assert_same_bits, loaded, variables)
    assert_same_bits(model.apply(loaded, tokens), model.apply(variables, tokens))
    jax.tree.map(assert_same_bits, from_fused_layout(variables, config), variables)  # today's comes back


def test_an_older_layout_of_moments_loads():
    config = fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=64)
    variables = fp8.GPT(config).init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    mu = from_fused_layout({"params": fused(variables, gated=False)["params"]}, config)["params"]
    assert set(from_fused_layout({"params": mu}, config)) == {"params"}
    jax.tree.map(assert_same_bits, mu, variables["params"])


def test_parts_that_were_mixed_up_would_be_noticed():
    """Negative control: keys for values have the same shapes, and are other numbers."""
    config = fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=64)
    variables = fp8.GPT(config).init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    loaded = from_fused_layout(fused(variables, gated=False), config)["params"]["layer_0"]["attention"]
    with pytest.raises(AssertionError):
        assert_same_bits(
            np.asarray(loaded["key"]["kernel"]), variables["params"]["layer_0"]["attention"]["value"]["kernel"]
        )


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({name: shapes_of(config) for name, config in CONFIGS.items()}, indent=1) + "\n")
