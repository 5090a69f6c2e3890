"""The FP8 state survives what users do to layers: sharing, remat, scan, jit, evaluation. All of it is exact."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from layers import FEATURES, RECIPE, Chain, Scanned, dense, inputs, unstack, weighted_sum

import jax_fp8 as fp8
from jax_fp8.core import fp8_gemm

pytestmark = pytest.mark.versions

INPUT, KERNEL, OUTPUT_GRADIENT = 0, 1, 2


def staged(module, x, weights, seed=0, jit=True):
    """Variables, gradients and staged state of one pass."""
    variables = module.init(jax.random.key(seed), x)
    run = fp8.value_and_grad(weighted_sum(module))
    _, grads, state = (jax.jit(run) if jit else run)(variables, x, weights)
    return variables, grads, state


def amaxes(gemm):
    return np.asarray(gemm["amax_history"][..., 0])


def test_amaxes_are_those_of_input_kernel_and_output_gradient():
    x, weights = inputs()
    variables, _, state = staged(dense(), x, weights)
    expected = [reference.amax(a) for a in (x, variables["params"]["kernel"], weights)]
    np.testing.assert_array_equal(amaxes(state), expected)
    np.testing.assert_array_equal(state["amax_history"][:, 1:], 0)
    np.testing.assert_array_equal(state["scale"], variables["fp8"]["scale"])


def test_initial_scale_is_the_kernels_own():
    x, _ = inputs()
    variables = dense().init(jax.random.key(0), x)
    scale = reference.scale_from_amax(reference.amax(variables["params"]["kernel"]), fp8.E4M3)
    np.testing.assert_array_equal(variables["fp8"]["scale"], np.float32([1, scale, 1]))
    np.testing.assert_array_equal(variables["fp8"]["amax_history"], np.zeros((3, RECIPE.amax_history_len)))


def test_a_shared_layer_stages_the_maximum_over_its_uses():
    x, weights = inputs()
    variables, grads, state = staged(Chain(shared=True), x, weights)
    apart = {collection: {"first": v["first"], "second": v["first"]} for collection, v in variables.items()}
    _, apart_grads, apart_state = jax.jit(fp8.value_and_grad(weighted_sum(Chain())))(apart, x, weights)
    uses = np.stack([amaxes(apart_state[name]) for name in ("first", "second")])
    np.testing.assert_array_equal(amaxes(state["first"]), uses.max(axis=0))
    assert (uses.max(axis=0) < uses.sum(axis=0)).all()  # a sum, what cotangents would give, is something else
    both = jax.tree.map(lambda a, b: a + b, apart_grads["first"], apart_grads["second"])
    reference.assert_close(grads["first"]["kernel"], both["kernel"], "float32")


def test_remat_changes_no_bit():
    x, weights = inputs()
    _, grads, state = staged(Chain(), x, weights)
    _, remat_grads, remat_state = staged(Chain(remat=True), x, weights)
    jax.tree.map(np.testing.assert_array_equal, state, remat_state)
    for name in grads:
        np.testing.assert_array_equal(grads[name]["kernel"], remat_grads[name]["kernel"])


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_equal_unrolled_ones(remat):
    x, weights = inputs()
    variables, grads, state = staged(Scanned(remat=remat), x, weights)
    apart = {collection: unstack(v, 3) for collection, v in variables.items()}
    _, expected_grads, expected_state = jax.jit(fp8.value_and_grad(weighted_sum(Scanned(unrolled=True))))(
        apart, x, weights
    )
    unstacked = unstack(state, 3)
    forward = {name: amaxes(layer["dense"])[:OUTPUT_GRADIENT] for name, layer in unstacked.items()}
    for name, layer in expected_state.items():
        np.testing.assert_array_equal(forward[name], amaxes(layer["dense"])[:OUTPUT_GRADIENT])
    assert len({float(a[INPUT]) for a in forward.values()}) == 3  # each layer its own slot
    # tanh and its derivative are the user's, and round differently in a loop;
    # the amax of what comes out may differ by a bfloat16 step.
    for name, layer in expected_state.items():
        np.testing.assert_allclose(amaxes(unstacked[name]["dense"]), amaxes(layer["dense"]), rtol=2**-6)
        kernel = unstack(grads, 3)[name]["dense"]["kernel"]
        reference.assert_close(kernel, expected_grads[name]["dense"]["kernel"], "linear_gradient")


@pytest.mark.parametrize(
    "module", [dense(), Chain(), Chain(shared=True), Scanned()], ids=["dense", "chain", "shared", "scanned"]
)
def test_jit_changes_no_bit_of_the_state(module):
    x, weights = inputs()
    _, _, jitted = staged(module, x, weights, jit=True)
    _, _, eager = staged(module, x, weights, jit=False)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)


def test_a_jitted_loss_inside_stages_the_same():
    x, weights = inputs()
    module = Chain()
    variables, _, state = staged(module, x, weights)
    _, _, inner = fp8.value_and_grad(jax.jit(weighted_sum(module)))(variables, x, weights)
    jax.tree.map(np.testing.assert_array_equal, state, inner)


def test_gradient_amaxes_are_not_clipped_with_the_gradients():
    x, weights = inputs()
    _, small, state = staged(dense(), x, weights)
    _, large, large_state = staged(dense(), x, 1024 * weights)
    assert amaxes(large_state)[OUTPUT_GRADIENT] == 1024 * amaxes(state)[OUTPUT_GRADIENT]
    assert set(small) == set(large) == {"kernel", "bias"}  # no state among the gradients that a global norm would count


def test_a_frozen_layer_still_stages_its_forward():
    x, weights = inputs()
    module = dense()
    variables = module.init(jax.random.key(0), x)
    frozen = fp8.value_and_grad(
        lambda v, x, w: jnp.sum(jax.lax.stop_gradient(module.apply(v, x)).astype(jnp.float32) * w)
    )
    _, grads, state = frozen(variables, x, weights)
    assert not np.any(grads["kernel"])
    np.testing.assert_array_equal(amaxes(state), [reference.amax(x), reference.amax(variables["params"]["kernel"]), 0])


def test_evaluation_without_mutable_reads_only():
    x, _ = inputs()
    module = dense()
    variables = module.init(jax.random.key(0), x)
    y = module.apply(variables, x)
    y_mutable, updated = module.apply(variables, x, mutable=["fp8"])
    reference.assert_same_bits(y, y_mutable)
    np.testing.assert_array_equal(variables["fp8"]["amax_history"], 0)
    kernel_amax = reference.amax(variables["params"]["kernel"])
    np.testing.assert_array_equal(amaxes(updated["fp8"]), [reference.amax(x), kernel_amax, 0])


def test_calibration_without_gradients_keeps_the_maximum():
    x, _ = inputs()
    module = dense()
    variables = module.init(jax.random.key(0), x)
    for batch in (x, 4 * x, 2 * x):
        _, updated = module.apply(variables, batch, mutable=["fp8"])
        variables = {**variables, **updated}
    assert amaxes(variables["fp8"])[INPUT] == 4 * reference.amax(x)
    finished = fp8.update_state(variables["fp8"], RECIPE)
    assert finished["scale"][INPUT] == reference.scale_from_amax(4 * reference.amax(x), fp8.E4M3)


def test_aux_with_the_mutated_collection_has_no_extra_leaves():
    x, weights = inputs()
    module = dense()
    variables = module.init(jax.random.key(0), x)

    def loss(variables, x, weights):
        y, updated = module.apply(variables, x, mutable=["fp8"])
        return jnp.sum(y.astype(jnp.float32) * weights), updated

    (_, aux), _, state = fp8.value_and_grad(loss, has_aux=True)(variables, x, weights)
    assert jax.tree.structure(aux["fp8"]) == jax.tree.structure(dict(variables["fp8"]))
    np.testing.assert_array_equal(amaxes(aux["fp8"])[:OUTPUT_GRADIENT], amaxes(state)[:OUTPUT_GRADIENT])


def test_a_plain_gradient_is_scaled_by_its_own_amax():
    """Without a recorder no history ever follows an output gradient: its scale must come from itself, however small."""
    x, weights = inputs()
    module, tiny = dense(), 2.0**-30
    variables, _, state = staged(module, x, tiny * weights)
    warmed = fp8.update_state(state, RECIPE)  # scales as they would be after a step

    def of(take_gradient, fp8_state, weights):
        return take_gradient({"params": variables["params"], "fp8": fp8_state}, x, weights)

    fp8_gemm._warn_unrecorded.cache_clear()
    plain = jax.jit(jax.grad(weighted_sum(module)))
    with pytest.warns(UserWarning, match="differentiate with jax_fp8.value_and_grad"):
        own = of(plain, variables["fp8"] | {"scale": warmed["scale"].at[OUTPUT_GRADIENT].set(1.0)}, tiny * weights)
    recorded = jax.jit(fp8.value_and_grad(weighted_sum(module)))
    _, expected, _ = of(recorded, warmed, tiny * weights)
    np.testing.assert_array_equal(own["params"]["kernel"], expected["kernel"])
    assert np.any(own["params"]["kernel"])
    np.testing.assert_array_equal(own["fp8"]["amax_history"], 0)
    # The control: a scale of 1, which is believed where somebody records, makes zeros of such a gradient.
    _, lost, _ = of(recorded, warmed | {"scale": warmed["scale"].at[OUTPUT_GRADIENT].set(1.0)}, tiny * weights)
    np.testing.assert_array_equal(lost["kernel"], 0)
    # It is said once.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(weighted_sum(dense()))(variables, x, weights)


def test_missing_state_is_an_error():
    x, _ = inputs()
    variables = dense().init(jax.random.key(0), x)
    with pytest.raises(ValueError, match='needs the collection "fp8"'):
        dense().apply({"params": variables["params"]}, x)


@pytest.mark.parametrize(("in_features", "features"), [(24, 16), (16, 24)])
def test_sizes_that_fp8_cannot_multiply_are_errors(in_features, features):
    x = jnp.ones((16, in_features), jnp.bfloat16)
    with pytest.raises(ValueError, match="divisible by 16, got 24"):
        fp8.Dense(features).init(jax.random.key(0), x)
    assert fp8.Dense(features, recipe=None).init_with_output(jax.random.key(0), x)[0].shape == (16, features)


def test_token_count_that_fp8_cannot_contract_is_an_error_in_the_backward_only():
    x, weights = inputs(rows=10)
    variables = dense().init(jax.random.key(0), x)
    assert dense().apply(variables, x).shape == (10, FEATURES)
    with pytest.raises(ValueError, match="multiple of 16, got 10"):
        fp8.value_and_grad(weighted_sum(dense()))(variables, x, weights)
