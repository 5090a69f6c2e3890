"""Names of dims: what layers call them, that no number changes with them, and that there are none unless asked for."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.meta import AxisMetadata
from hybrid import gpt, tokens
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.nn.names import named

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=2)
KEY, X = jax.random.key(0), jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 32)), jnp.bfloat16)


def names_of(module, x=X) -> dict:
    return nn.get_partition_spec(jax.eval_shape(module.init, KEY, x))["params"]


def test_names_of_layers():
    named = {"recipe": RECIPE, "logical_axes": True}
    norm = {"scale": P("norm"), "bias": P("norm")}
    up = {"kernel": P("embed", "mlp"), "bias": P("mlp")}
    down = {"kernel": P("mlp", "residual"), "bias": P("norm")}
    assert names_of(fp8.Dense(32, tensor_split="columns", **named)) == up
    assert names_of(fp8.Dense(32, tensor_split="rows", **named)) == down
    assert names_of(fp8.LayerNormDense(32, tensor_split="columns", **named)) == {"norm": norm, **up}
    gated = fp8.LayerNormMLP(64, activation="swiglu", norm="rmsnorm", **named)
    assert names_of(gated) == {"norm": {"scale": P("norm")}, "gate": up, "up": up, "down": down}
    block = names_of(fp8.TransformerBlock(4, 64, 2, **named))
    of_kv = {"kernel": P("embed", "kv_heads"), "bias": P("kv_heads")}
    assert block["attention"] == {
        "norm": norm, "key": of_kv, "value": of_kv,
        "query": {"kernel": P("embed", "heads"), "bias": P("heads")},
        "out": {"kernel": P("heads", "residual"), "bias": P("norm")},
    }  # fmt: skip
    assert block["mlp"] == {"norm": norm, "up": up, "down": down}
    of_heads = names_of(fp8.SelfAttention(4, qk_norm=True, **named))
    assert of_heads["query_norm"] == of_heads["key_norm"] == {"scale": P("head_dim")}
    model = names_of(gpt(RECIPE, tie_embeddings=False).clone(logical_axes=True), tokens()[:, :-1])
    assert model.pop("positions") == P("positions", "residual") and model.pop("final_norm") == norm
    assert model.pop("embedding") == model.pop("head") == P("vocab", "residual")
    assert set(model) == {"layer_0", "layer_1"} and model["layer_1"]["mlp"]["down"] == down


def boxes(variables) -> list:
    is_box = lambda node: isinstance(node, AxisMetadata)  # noqa: E731
    return [leaf for leaf in jax.tree.leaves(variables, is_leaf=is_box) if is_box(leaf)]


def test_without_the_field_and_where_nobody_knows_there_are_none():
    assert not boxes(jax.eval_shape(gpt(RECIPE).init, KEY, tokens()[:, :-1]))
    assert not boxes(jax.eval_shape(fp8.Dense(32, recipe=RECIPE, logical_axes=True).init, KEY, X))
    with pytest.raises(ValueError, match="logical_axes must be True or False, got 'mlp'"):
        jax.eval_shape(fp8.Dense(32, logical_axes="mlp").init, KEY, X)  # type: ignore


def test_an_initializer_that_names_its_dims_is_left_alone():
    own = nn.with_partitioning(nn.initializers.ones, (None, "tensor"))
    made = named(own, ("embed", "mlp"), True)(KEY, (2, 4))
    assert type(made) is nn.Partitioned and made.names == (None, "tensor")
    assert named(own, None, True) is own and named(own, ("embed", "mlp"), False) is own
    layer = fp8.Dense(32, recipe=RECIPE, kernel_init=own, tensor_split="columns", logical_axes=True)
    assert names_of(layer) == {"kernel": P(None, "tensor"), "bias": P("mlp")}


@pytest.mark.parametrize("recipe", [RECIPE, pytest.param(None, marks=pytest.mark.slow)], ids=["delayed", "none"])
def test_the_numbers_are_those_without_names(recipe):
    """Whether variables are boxed or not, and whether the layer names dims or not."""
    plain, with_names = (fp8.TransformerBlock(4, 64, recipe=recipe, logical_axes=names) for names in (False, True))
    variables, boxed = plain.init(KEY, X), with_names.init(KEY, X)
    assert len(boxes(boxed)) == len(jax.tree.leaves(variables["params"]))
    jax.tree.map(assert_same_bits, nn.unbox(boxed), variables)

    def of(model):
        return jax.jit(fp8.value_and_grad(lambda variables, x: jnp.mean(model.apply(variables, x).astype(jnp.float32))))

    expected = of(plain)(variables, X)
    for model, given in ((with_names, boxed), (with_names, variables), (plain, boxed)):
        jax.tree.map(assert_same_bits, nn.unbox(of(model)(given, X)), expected)


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(_, x):
            return fp8.LayerNormMLP(64, recipe=RECIPE, logical_axes=True, name="mlp")(x), None

        axes = {"params": 0, "fp8": 0}
        options = {"split_rngs": {"params": True}, "metadata_params": {nn.PARTITION_NAME: "layers"}, "length": 2}
        return nn.scan(nn.remat(body), variable_axes=axes, **options)(self, x)[0]


def test_stacked_layers_have_a_name_more():
    found = names_of(Stacked())["mlp"]
    assert found["up"] == {"kernel": P("layers", "embed", "mlp"), "bias": P("layers", "mlp")}
