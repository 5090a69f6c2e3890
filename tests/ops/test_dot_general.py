"""`dot_general` and `einsum` in FP8 against jax's own, whatever dims are contracted, columns and groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=4), fp8.CurrentScaling()
SIZES = {"B": 2, "T": 16, "D": 32, "N": 4, "H": 16, "E": 3, "C": 32, "M": 48}
EINSUMS = {
    "BTD,DM->BTM": None,
    "BTD,NDH->BTNH": None,
    "BTNH,NHD->BTD": None,
    "BTHN,NHD->BDT": None,
    "...D,DM->...M": "BTD",
    "EBCD,EDM->EBCM": None,
    "BTED,EDM->BTEM": None,
    "BTNH,BNHC->NBTC": None,
}


def drawn(names, seed, scale=1.0):
    return jax.random.normal(jax.random.key(seed), [SIZES[name] for name in names]) * scale


def operands(text):
    inputs = text.replace(" ", "").split("->")[0].split(",")
    return drawn(EINSUMS[text] or inputs[0], 1), drawn(inputs[1], 2, 0.2)


def relative(found, expected):
    return float(jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel()))


@pytest.mark.parametrize("text", EINSUMS)
def test_einsum_and_its_gradients_are_those_of_jnp(text):
    x, kernel = operands(text)

    def loss(multiply):
        return lambda x, kernel: jnp.sum(jnp.sin(multiply(x, kernel)))

    ours = lambda x, kernel: fp8.einsum(text, x, kernel, recipe=CURRENT)  # noqa: E731
    plain = lambda x, kernel: jnp.einsum(text, x, kernel)  # noqa: E731
    found, expected = (jax.value_and_grad(loss(multiply), (0, 1))(x, kernel) for multiply in (ours, plain))
    assert ours(x, kernel).shape == plain(x, kernel).shape
    assert 0 < relative(ours(x, kernel), plain(x, kernel)) < 0.05
    assert all(0 < relative(*pair) < 0.1 for pair in zip(found[1], expected[1], strict=True))
    other = jnp.roll(expected[1][1], 1, axis=-1)  # a control: gradients of other columns
    assert relative(found[1][1], other) > 0.5


@pytest.mark.parametrize(
    "numbers", [(((2,), (0,)), ((), ())), (((1, 2), (1, 0)), ((), ())), (((2,), (1,)), ((0,), (0,)))]
)
def test_dot_general_has_the_dims_of_lax(numbers):
    (of_lhs, of_rhs), (batch, _) = numbers
    lhs = drawn("BTD", 1)
    shape = [16, 16]
    for a, b in zip((*of_lhs, *batch), (*of_rhs, *numbers[1][1]), strict=True):
        shape = shape if b < len(shape) else [*shape, 16]
        shape[b] = lhs.shape[a]
    rhs = jax.random.normal(jax.random.key(2), (*shape, 16))
    found = fp8.dot_general(lhs, rhs, numbers, recipe=CURRENT)
    expected = jax.lax.dot_general(lhs, rhs, numbers)
    assert found.shape == expected.shape and relative(found, expected) < 0.05


def test_groups_are_products_of_their_own():
    """One grouped GEMM: each group has its own rows and kernel, and the scale of all."""
    x, kernel = operands("EBCD,EDM->EBCM")
    found = fp8.einsum("EBCD,EDM->EBCM", x, kernel, recipe=CURRENT)
    rounded = [
        fp8.quantize(each, fp8.E4M3, jnp.max(jnp.abs(each)) / 448).dequantize(jnp.float32) for each in (x, kernel)
    ]
    np.testing.assert_allclose(found, jnp.einsum("EBCD,EDM->EBCM", *rounded), rtol=1e-5, atol=1e-5)
    assert np.any(found != jnp.einsum("EBCD,EDM->EBCM", rounded[0], jnp.roll(rounded[1], 1, axis=0)))


def test_the_state_of_groups_is_that_of_all_of_them():
    x, kernel = operands("EBCD,EDM->EBCM")

    def loss(state):
        return jnp.sum(jnp.sin(fp8.einsum("EBCD,EDM->EBCM", x, kernel, recipe=DELAYED, state=state)))

    new = jax.grad(loss)(fp8.init_state(DELAYED, kernel))
    largest = [jnp.max(jnp.abs(each)) for each in (x, kernel)]
    np.testing.assert_array_equal(new["amax_history"][:2, 3], largest)
    assert new["amax_history"][2, 3] > 0


def test_dtypes_are_those_of_lax():
    x, kernel = (operand.astype(jnp.bfloat16) for operand in operands("BTD,DM->BTM"))
    assert fp8.einsum("BTD,DM->BTM", x, kernel, recipe=CURRENT).dtype == jnp.bfloat16
    wide = fp8.einsum("BTD,DM->BTM", x, kernel, recipe=CURRENT, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    grads = jax.grad(lambda kernel: jnp.sum(fp8.einsum("BTD,DM->BTM", x, kernel, recipe=CURRENT)))(kernel)
    assert grads.dtype == jnp.bfloat16


def test_block_scaling_needs_no_state():
    x, kernel = jax.random.normal(jax.random.key(0), (2, 128, 128)), jax.random.normal(jax.random.key(1), (128, 128))
    found = fp8.einsum("BTD,DM->BTM", x, kernel, recipe=fp8.BlockScaling())
    assert fp8.init_state(fp8.BlockScaling()) == {} and relative(found, x @ kernel) < 0.05


X, KERNEL = drawn("TD", 1), drawn("DM", 2)
STATE = fp8.init_state(DELAYED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("TD,DM->TM", X, KERNEL, None, None), "einsum needs a recipe, got None"),
        (("TD,DM->TM", X, KERNEL, DELAYED, None), r"must have scale float32\[3\], got None; pass init_state"),
        (("TD,DM->TM", X, KERNEL, DELAYED, {"scale": STATE["scale"]}), r"must have amax_history float32\[3, 4\]"),
        (("TD,DM->TM", X, KERNEL, fp8.DelayedScaling(), STATE), r"float32\[3, 1024\], got float32\[3, 4\]"),
        (("TD,DM->TM", X, KERNEL, CURRENT, STATE), "keeps no state, got a dict with 'scale'|keeps no state"),
        (("TD,DM->T", X, KERNEL, CURRENT, None), "takes a product of matrices"),
        (("TD,DM->TM", X[None], KERNEL, CURRENT, None), "needs 2 dims"),
        (("TD,DM->TM", X, KERNEL[None], CURRENT, None), "needs 2 dims of its kernel"),
        (("TD,DM->TM", X, KERNEL[:16], CURRENT, None), "must have equal sizes"),
        (("TD,DM->TM", X, KERNEL[:, :10], CURRENT, None), "out features divisible by 16, got 10"),
        (("TD,DM->TM", X.astype(jnp.int32), KERNEL, CURRENT, None), r"floating point numbers, got int32\[16, 32\]"),
        (("TD,DM->TM", X, fp8.quantize(KERNEL, fp8.E4M3, 1.0), CURRENT, None), "must be arrays"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    text, x, kernel, recipe, state = arguments
    with pytest.raises(ValueError, match=message):
        fp8.einsum(text, x, kernel, recipe=recipe, state=state)


def test_other_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="contracts at least one dim"):
        fp8.dot_general(X, KERNEL, (((), ()), ((), ())), recipe=CURRENT)
    with pytest.raises(ValueError, match="precision must be None"):
        fp8.einsum("TD,DM->TM", X, KERNEL, recipe=CURRENT, precision="highest")
    with pytest.raises(ValueError, match="must be bfloat16, float16 or float32, got int8"):
        fp8.einsum("TD,DM->TM", X, KERNEL, recipe=CURRENT, preferred_element_type=jnp.int8)
    with pytest.raises(ValueError, match="init_state needs a recipe"):
        fp8.init_state(None)
