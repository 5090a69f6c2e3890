"""Amaxes come out of a backward pass as what they are: the largest over all uses, and never mixed up with gradients.

Losses are sums of outputs times known weights, so that every output gradient, and its amax, is known exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_gemm import Fp8Gemm, Record
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.core.recorder import RECORDER
from jax_fp8.core.state import initial_state
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.tape import added_by_gemms
from jax_fp8.ops import passes
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.train.custom_loop import value_and_grad

pytestmark = pytest.mark.versions

RECIPE = DelayedScaling(amax_history_len=4)
FEATURES = 16


def array(seed, *shape, size=1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * size).astype(jnp.bfloat16)


def inputs(seed, size=1.0) -> tuple[jax.Array, jax.Array]:
    """An input, and the output gradient it will meet."""
    return array(seed, 16, FEATURES, size=size), array(seed + 100, 16, FEATURES, size=size)


def make_variables(*names, recipe=RECIPE) -> dict:
    params = {name: {"kernel": array(10 + i, FEATURES, FEATURES).astype(jnp.float32)} for i, name in enumerate(names)}
    if not isinstance(recipe, DelayedScaling):
        return {"params": params}
    states = {name: initial_state(recipe, jnp.max(jnp.abs(params[name]["kernel"]))) for name in names}
    return {"params": params, "fp8": states}


def apply_gemm(kernel, gemm, x):
    """What a layer does: scale by its state, and record where it may."""
    recorder = gemm.get(RECORDER)
    scales = None if recorder and recorder.from_current else gemm["scale"]
    record = recorder.record if recorder else Record()
    y, amaxes = linear(x, LinearParameters(kernel, None), Fp8Gemm(RECIPE, "dense", scales, record))
    if record.slot is None:
        record.amaxes(lax.stop_gradient(amaxes))
    return y


def dense(variables, x, name="dense"):
    return apply_gemm(variables["params"][name]["kernel"], variables["fp8"][name], x)


def weighted_sum(y, weights):
    return jnp.sum(y.astype(jnp.float32) * weights.astype(jnp.float32))


def one_use(variables, x, dy):
    return weighted_sum(dense(variables, x), dy)


def two_uses(variables, x, dy, other_x, other_dy):
    return one_use(variables, x, dy) + one_use(variables, other_x, other_dy)


def staged(fp8_state, name="dense") -> np.ndarray:
    return np.asarray(fp8_state[name]["amax_history"][:, 0])


def amaxes_of(*arrays) -> np.ndarray:
    return np.array([reference.amax(array) for array in arrays])


@pytest.mark.parametrize("transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")])
def test_staged_amaxes_are_those_of_input_kernel_and_output_gradient(transform):
    variables, (x, dy) = make_variables("dense"), inputs(0)
    _, grads, fp8_state = transform(value_and_grad(one_use))(variables, x, dy)
    expected = amaxes_of(x, variables["params"]["dense"]["kernel"], dy)
    assert_same_bits(staged(fp8_state), expected)
    assert len(set(expected)) == 3  # a row in the wrong place would show
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])


def test_nothing_else_in_the_state_changes():
    variables, (x, dy) = make_variables("dense", "unused"), inputs(0)
    history = jnp.arange(12, dtype=jnp.float32).reshape(3, 4).at[:, 0].set(0)
    variables["fp8"]["dense"]["amax_history"] = history
    _, grads, fp8_state = value_and_grad(one_use)(variables, x, dy)
    assert jax.tree.structure(fp8_state) == jax.tree.structure(variables["fp8"])
    assert_same_bits(fp8_state["dense"]["scale"], variables["fp8"]["dense"]["scale"])
    assert_same_bits(fp8_state["dense"]["amax_history"][:, 1:], history[:, 1:])
    jax.tree.map(assert_same_bits, fp8_state["unused"], variables["fp8"]["unused"])
    assert not np.any(grads["unused"]["kernel"]) and np.any(grads["dense"]["kernel"])
    assert not np.any(history[:, 0])  # state goes in and comes out; it is not changed in place


def test_two_uses_stage_the_maximum_not_the_sum_nor_the_last():
    variables = make_variables("dense")
    (x, dy), (other_x, other_dy) = inputs(0, size=4.0), inputs(1)
    kernel = variables["params"]["dense"]["kernel"]
    both = {"first": amaxes_of(x, kernel, dy), "last": amaxes_of(other_x, kernel, other_dy)}
    _, _, fp8_state = value_and_grad(two_uses)(variables, x, dy, other_x, other_dy)
    assert_same_bits(staged(fp8_state), np.maximum(both["first"], both["last"]))
    for wrong in (both["first"] + both["last"], both["last"]):
        with pytest.raises(AssertionError):
            assert_same_bits(staged(fp8_state), wrong)


def test_gradients_of_shared_weights_are_summed():
    variables = make_variables("dense")
    first, last = inputs(0), inputs(1)
    _, grads, _ = value_and_grad(two_uses)(variables, *first, *last)
    expected = sum(value_and_grad(one_use)(variables, *pair)[1]["dense"]["kernel"] for pair in (first, last))
    assert_same_bits(grads["dense"]["kernel"], expected)


def test_staged_amaxes_are_kept_by_maximum():
    variables, (x, dy) = make_variables("dense"), inputs(0)
    earlier = jnp.float32([100, 0.001, 50])
    variables["fp8"]["dense"]["amax_history"] = variables["fp8"]["dense"]["amax_history"].at[:, 0].set(earlier)
    _, _, fp8_state = value_and_grad(one_use)(variables, x, dy)
    kernel_amax = reference.amax(variables["params"]["dense"]["kernel"])
    assert_same_bits(staged(fp8_state), np.float32([100, kernel_amax, 50]))


def test_microbatches_in_a_scan():
    variables = make_variables("dense")
    (x, dy), (other_x, other_dy) = inputs(0, size=4.0), inputs(1)

    def microbatch(fp8_state, batch):
        _, grads, fp8_state = value_and_grad(one_use)({**variables, "fp8": fp8_state}, *batch)
        return fp8_state, grads

    batches = jnp.stack([x, other_x]), jnp.stack([dy, other_dy])
    fp8_state, _ = jax.jit(lambda state: lax.scan(microbatch, state, batches))(variables["fp8"])
    _, _, expected = value_and_grad(two_uses)(variables, x, dy, other_x, other_dy)
    jax.tree.map(assert_same_bits, fp8_state, expected)


def test_a_rematerialised_forward_stages_the_same():
    variables, (x, dy) = make_variables("dense"), inputs(0)

    def loss(variables, x, dy):
        layer = jax.checkpoint(lambda kernel, x: apply_gemm(kernel, variables["fp8"]["dense"], x))
        return weighted_sum(layer(variables["params"]["dense"]["kernel"], x), dy)

    _, grads, fp8_state = value_and_grad(loss)(variables, x, dy)
    _, expected_grads, expected_state = value_and_grad(one_use)(variables, x, dy)
    jax.tree.map(assert_same_bits, fp8_state, expected_state)
    reference.assert_close(grads["dense"]["kernel"], expected_grads["dense"]["kernel"], "gemm_float32")


def test_layers_stacked_by_a_scan_stage_each_their_own():
    names = ("layer_0", "layer_1", "layer_2")
    # Integers and scales of 1: all sums are exact, in whatever order the two programs make them.
    unrolled, x, dy = jax.tree.map(jnp.round, (make_variables(*names), *inputs(0)))
    unrolled["fp8"] = {name: {**gemm, "scale": jnp.ones(3)} for name, gemm in unrolled["fp8"].items()}
    stacked = {
        collection: {
            "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(unrolled[collection][name] for name in names))
        }
        for collection in unrolled
    }

    def unrolled_loss(variables, x, dy):
        for name in names:
            x = dense(variables, x, name)
        return weighted_sum(x, dy)

    def scanned_loss(variables, x, dy):
        def layer(x, variables):
            return apply_gemm(variables["params"]["kernel"], variables["fp8"], x), None

        layers = {collection: variables[collection]["layers"] for collection in variables}
        return weighted_sum(lax.scan(layer, x, layers)[0], dy)

    loss, grads, fp8_state = jax.jit(value_and_grad(scanned_loss))(stacked, x, dy)
    expected_loss, expected_grads, expected_state = jax.jit(value_and_grad(unrolled_loss))(unrolled, x, dy)
    assert_same_bits(loss, expected_loss)
    for i, name in enumerate(names):
        of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], (grads["layers"], fp8_state["layers"]))
        jax.tree.map(assert_same_bits, of_layer, (expected_grads[name], expected_state[name]))
    assert len({staged(expected_state, name)[0] for name in names}) == 3  # slots mixed up would show


def test_aux_comes_back_and_carries_no_recorder():
    variables, (x, dy) = make_variables("dense"), inputs(0)

    def loss_and_aux(variables, x, dy):
        return one_use(variables, x, dy), ({"fp8": variables["fp8"], "size": x.size}, [x])

    (loss, (collections, (returned,))), grads, fp8_state = value_and_grad(loss_and_aux, has_aux=True)(variables, x, dy)
    expected_loss, expected_grads, expected_state = value_and_grad(one_use)(variables, x, dy)
    assert_same_bits(loss, expected_loss)
    jax.tree.map(assert_same_bits, (grads, fp8_state), (expected_grads, expected_state))
    assert collections["size"] == x.size
    assert_same_bits(returned, x)
    assert jax.tree.structure(collections["fp8"]) == jax.tree.structure(variables["fp8"])


def test_keyword_arguments_reach_the_loss():
    variables, (x, dy) = make_variables("dense"), inputs(0)
    loss, _, _ = value_and_grad(one_use)(variables, x=x, dy=dy)
    assert_same_bits(loss, value_and_grad(one_use)(variables, x, dy)[0])


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["bfloat16", "current"])
def test_without_state_there_is_none_to_hand_back(recipe):
    variables, (x, dy) = make_variables("dense", recipe=recipe), inputs(0)
    scaling = recipe and Fp8Gemm(recipe, "dense")

    def loss_fn(variables, x, dy):
        assert "fp8" not in variables
        return weighted_sum(linear(x, LinearParameters(variables["params"]["dense"]["kernel"], None), scaling)[0], dy)

    loss, grads, fp8_state = value_and_grad(loss_fn)(variables, x, dy)
    assert fp8_state == {}
    assert np.isfinite(loss) and np.any(grads["dense"]["kernel"])


def test_warm_start_scales_every_tensor_by_itself():
    variables, (x, dy) = make_variables("dense"), inputs(0, size=1e-5)
    variables["fp8"]["dense"]["scale"] = jnp.float32([1e6, 1e6, 1e6])  # everything would round to zero
    found = take_gradients(one_use, from_current=True)(variables, x, dy)

    def with_current_scaling(params):
        scaling = Fp8Gemm(CurrentScaling(), "dense")
        return weighted_sum(linear(x, LinearParameters(params["dense"]["kernel"], None), scaling)[0], dy)

    expected_loss, expected_grads = jax.value_and_grad(with_current_scaling)(variables["params"])
    assert_same_bits(found.loss, expected_loss)
    jax.tree.map(assert_same_bits, found.grads, expected_grads)
    assert_same_bits(found.amaxes, amaxes_of(x, variables["params"]["dense"]["kernel"], dy))
    assert not np.any(value_and_grad(one_use)(variables, x, dy)[1]["dense"]["kernel"])


def test_a_plain_gradient_is_the_same_and_stages_nothing():
    variables, (x, dy) = make_variables("dense"), inputs(0)
    plain = jax.value_and_grad(lambda params: one_use({**variables, "params": params}, x, dy))(variables["params"])
    jax.tree.map(assert_same_bits, plain, value_and_grad(one_use)(variables, x, dy)[:2])
    assert not np.any(staged(variables["fp8"]))


@pytest.mark.parametrize(
    ("variables", "arrived"),
    [({"fp8": {}}, r"a dict with \['fp8'\]"), ({}, r"a dict with \[\]"), ([1.0], "list"), (jnp.ones(2), "ArrayImpl")],
)
def test_variables_without_params_are_refused(variables, arrived):
    message = rf'must take a variable dict with "params" first, got {arrived}; pass \{{"params": ..., "fp8": ...\}}'
    with pytest.raises(ValueError, match=message):
        value_and_grad(one_use)(variables)


def test_kernel_scales_come_from_the_kernel():
    """The tests above would hold with any scale; this is the one they ran with."""
    variables = make_variables("dense")
    kernel_amax = reference.amax(variables["params"]["dense"]["kernel"])
    assert_same_bits(variables["fp8"]["dense"]["scale"][1], reference.scale_from_amax(kernel_amax, E4M3))


def loss_of_two(variables, x, dy):
    """A kernel that two GEMMs and the loss itself use, and one that one GEMM uses."""
    y = dense(variables, dense(variables, x), "dense") + dense(variables, x, "other")
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)) + jnp.sum(variables["params"]["dense"]["kernel"])


def test_gradients_add_up_in_their_gemms():
    variables = make_variables("dense", "other")
    start = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), variables["params"])

    @jax.jit
    def run(sums, *batch):
        return take_gradients(loss_of_two, sums=sums, weight=0.5)(variables, *batch)

    sums, expected = start, start
    for seed in (1, 2):
        found = run(sums, *inputs(seed))
        sums = found.grads
        wanted_loss, grads, wanted_state = jax.jit(value_and_grad(loss_of_two))(variables, *inputs(seed))
        expected = jax.tree.map(lambda total, g: total + 0.5 * g, expected, grads)
        assert float(found.loss) == float(wanted_loss)
        assert_same_bits(found.amaxes, np.concatenate([staged(wanted_state, "dense"), staged(wanted_state, "other")]))
    jax.tree.map(lambda ours, theirs: reference.assert_close(ours, theirs, "float32"), sums, expected)
    for forgotten in (start, jax.tree.map(lambda total: 2 * total, expected)):
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(sums["dense"]["kernel"], forgotten["dense"]["kernel"], "float32")


@pytest.mark.parametrize("smallest_wgrad", [0, 2**30], ids=["wgrads", "one wgrad"])
def test_the_gradients_of_kernels_side_by_side_add_up(smallest_wgrad, monkeypatch):
    """One GEMM, two kernels, and a loss that uses one of them on another way too."""
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", smallest_wgrad)
    params = {name: {"kernel": array(seed, FEATURES, 32).astype(jnp.float32)} for seed, name in enumerate("ab")}

    def loss_fn(variables, x, dy):
        kernels = tuple(variables["params"][name]["kernel"] for name in "ab")
        state = variables["fp8"]["a+b"]
        record = state[RECORDER].record if RECORDER in state else Record()
        a, b = linear(x, LinearParameters(kernels, None), Fp8Gemm(RECIPE, "a+b", state["scale"], record))[0]
        return weighted_sum(a, dy) + 2 * weighted_sum(b, dy) + jnp.sum(kernels[1])

    x, dy = array(1, 16, FEATURES), array(2, 16, 32)
    variables = {"params": params, "fp8": {"a+b": initial_state(RECIPE, jnp.float32(4))}}
    by_gemm = [] if smallest_wgrad else [("a", "kernel"), ("b", "kernel")]
    assert added_by_gemms(variables["fp8"], params) == by_gemm
    start = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), params)
    found = jax.jit(take_gradients(loss_fn, sums=start, weight=0.5))(variables, x, dy)
    _, grads, state = jax.jit(value_and_grad(loss_fn))(variables, x, dy)
    assert_same_bits(found.amaxes, staged(state, "a+b"))
    for name in "ab":
        assert float(jnp.linalg.norm(grads[name]["kernel"])) > 1
        reference.assert_close(found.grads[name]["kernel"], 3 + 0.5 * grads[name]["kernel"], "float32")
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(found.grads["a"]["kernel"], 3 + 0.5 * grads["b"]["kernel"], "float32")
