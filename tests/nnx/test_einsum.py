"""An einsum in FP8 is the product of matrices that it says, and takes the place of `nnx.Einsum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from nnx_layers import RECIPE, RECIPES, assert_same, pure

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions

# The einsum, the shapes of kernel and bias, and of the input.
CASES = {
    "a matrix": ("BTD,DH->BTH", (32, 48), (48,), (2, 16, 32)),
    "queries": ("BTD,NDH->BTNH", (4, 32, 16), (4, 16), (2, 16, 32)),
    "keys and values": ("BSD,CKDH->CBSKH", (2, 2, 32, 16), None, (2, 16, 32)),
    "heads together": ("BTNH,NHD->BTD", (4, 16, 32), (32,), (2, 16, 4, 16)),
    "any leading dims": ("...D,DH->...H", (32, 48), None, (2, 2, 8, 32)),
}


def made(case, cls=fp8.nnx.Einsum, **options):
    text, kernel_shape, bias_shape, _ = CASES[case]
    bias_init = jax.nn.initializers.normal(1.0)
    return cls(text, kernel_shape, bias_shape, dtype=jnp.bfloat16, bias_init=bias_init, rngs=nnx.Rngs(0), **options)


def input_of(case):
    return jax.random.normal(jax.random.key(0), CASES[case][3], jnp.bfloat16)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_flax_computes(case, recipe):
    model, theirs = made(case, recipe=recipe), made(case, nnx.Einsum)
    x = input_of(case)
    y, expected = model(x), theirs(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    nnx.update(model, nnx.state(theirs, nnx.Param))
    reference.assert_close(model(x), expected, "bfloat16" if recipe is None else "linear")


@pytest.mark.parametrize("case", ["queries", "heads together"])
def test_gradients_and_state_are_those_of_the_product_of_matrices(case):
    model = made(case, recipe=RECIPE)
    linear = fp8.nnx.Linear(*model.matrix_shape, recipe=RECIPE, rngs=nnx.Rngs(0))
    linear.kernel[...], linear.bias[...] = model.parameters.kernel, model.parameters.bias
    linear.fp8 = nnx.data(fp8.nnx.state.GemmState(RECIPE, linear.kernel[...]))
    x = input_of(case)
    weights = jax.random.normal(jax.random.key(2), (32, model.matrix_shape[1]))

    def loss(model, x):
        return jnp.sum(model(x).reshape(weights.shape).astype(jnp.float32) * weights)

    differentiate = nnx.jit(fp8.nnx.value_and_grad(loss))
    found, grads = differentiate(model, x)
    expected, wanted = differentiate(linear, x.reshape(32, -1))
    assert found == expected
    grads, wanted = pure(grads), pure(wanted)
    assert grads["kernel"].shape == CASES[case][1] and np.any(grads["kernel"])
    assert_same(model.as_matrix(grads["kernel"]), wanted["kernel"])
    assert_same(grads["bias"].reshape(-1), wanted["bias"])
    assert_same(fp8.nnx.fp8_state(model)["~product"], fp8.nnx.fp8_state(linear))


def test_a_matrix_is_found_by_the_path_of_its_layer():
    model = nnx.Dict(a=made("a matrix", recipe=RECIPE), q=made("queries", recipe=RECIPE))
    assert sorted(fp8.nnx.fp8_state(model)["a"]) == ["amax_history", "scale"]
    variables, _ = fp8.nnx.split(model)
    assert sorted(fp8.cast_weights(variables, RECIPE)) == ["a", "cast_by", "params_version"]


@pytest.mark.parametrize("case", CASES)
def test_adapters_frozen_and_merged(case):
    model = made(case, recipe=RECIPE, lora=fp8.Lora(rank=4))
    model.lora_b[...] = jax.random.normal(jax.random.key(1), model.lora_b.shape)
    x = input_of(case)
    kernel, expected = np.asarray(model.kernel[...]), np.asarray(model(x), np.float32)
    fp8.nnx.freeze_kernels(model)
    assert model.kernel is None
    frozen = np.asarray(model(x), np.float32)
    fp8.nnx.merge_adapters(model)
    assert model.kernel[...].shape == kernel.shape and np.any(model.kernel[...] != kernel)
    for found in (frozen, np.asarray(model(x), np.float32)):
        assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r'Einsum\("BED,EDH->BEH", .*: its einsum .* has a product for each E; use nnx'
    ):
        fp8.nnx.Einsum("BED,EDH->BEH", (2, 16, 16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r'kernel_shape must have a size for each of "DH", got \(16, 2, 16\)'):
        fp8.nnx.Einsum("BD,DH->BH", (16, 2, 16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"bias_shape must have the columns of the kernel, \(4, 16\), got \(16, 4\)"):
        fp8.nnx.Einsum("BD,NDH->BNH", (4, 32, 16), (16, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="FP8 needs out features divisible by 16, got 10"):
        fp8.nnx.Einsum("BD,DH->BH", (16, 10), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="einsum_str must be a str, got a int"):
        fp8.nnx.Einsum(3, (16, 16), rngs=nnx.Rngs(0))
    layer = made("queries", recipe=RECIPE)
    for x in (jnp.ones((2, 32)), jnp.ones((2, 16, 48)), 3):
        with pytest.raises(ValueError, match='needs an array of the dims "BTD" with D=32, got'):
            layer(x)
    with pytest.raises(ValueError, match="has its einsum from its constructor, got another one, 'BD,DH->BH'"):
        layer(input_of("queries"), "BD,DH->BH")
    with pytest.raises(ValueError, match="out_sharding must be None"):
        layer(input_of("queries"), out_sharding=jax.P())
