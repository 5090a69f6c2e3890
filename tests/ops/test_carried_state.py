"""State whose gradient is its new value: the same numbers as `value_and_grad` and `update_state` of our own layers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_fp8 as fp8
from jax_fp8.ops import carried_state
from jax_fp8.ops.dot_general import product

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
LAYER = fp8.Dense(48, recipe=RECIPE, use_bias=False)
NUMBERS = (((1,), (0,)), ((), ()))


def batch(step):
    return jax.random.normal(jax.random.key(step), (64, 32), jnp.bfloat16) * 2.0**step


def multiply(x, kernel, state, recipe=RECIPE):
    return product("layer", x, kernel, NUMBERS, None, jnp.bfloat16, recipe, state)


def loss_of(kernel, state, x):
    return jnp.mean(multiply(x, kernel, state).astype(jnp.float32) ** 2)


def own_loss(variables, x):
    return jnp.mean(LAYER.apply(variables, x).astype(jnp.float32) ** 2)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_steps_are_those_of_our_own_layer():
    variables = LAYER.init(jax.random.key(9), batch(0))
    kernel, own = variables["params"]["kernel"], variables["fp8"]
    state = fp8.init_state(RECIPE, kernel)
    own = {**own, "scale": own["scale"].at[2].set(2.0**-22)}
    same(state, own)
    step, own_step = jax.jit(jax.value_and_grad(loss_of, (0, 1))), jax.jit(fp8.value_and_grad(own_loss))
    for number in range(6):
        loss, (grad, state) = step(kernel, state, batch(number % 5))
        expected, grads, own = own_step({"params": {"kernel": kernel}, "fp8": own}, batch(number % 5))
        own = fp8.update_state(own, RECIPE)
        same((loss, state), (expected, own))
        np.testing.assert_allclose(grad, grads["kernel"], rtol=1e-5, atol=1e-7 * 4.0**number)  # XLA's sums on a CPU
    assert np.all(np.asarray(state["amax_history"])[:, 1:] > 0)
    assert len(np.unique(np.asarray(state["amax_history"])[0])) == 4  # a control: every step has an amax of its own


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit, lambda f: f], ids=["remat", "jit", "plain"])
def test_state_passes_through_transformations(transform):
    kernel, x = jax.random.normal(jax.random.key(1), (32, 48)), batch(0)
    state = fp8.init_state(RECIPE, kernel)
    found = jax.grad(lambda kernel, state: loss_of_transformed(transform, kernel, state, x), (0, 1))(kernel, state)
    expected = jax.grad(loss_of, (0, 1))(kernel, state, x)
    same(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-7)


def loss_of_transformed(transform, kernel, state, x):
    return transform(loss_of)(kernel, state, x)


def test_stacked_layers_have_a_state_each():
    kernels = jax.random.normal(jax.random.key(1), (3, 32, 32)) * 0.2
    states = jax.vmap(lambda kernel: fp8.init_state(RECIPE, kernel))(kernels)

    def scanned(kernels, states, x):
        x, _ = lax.scan(lambda x, of: (multiply(x, *of), None), x, (kernels, states))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def unrolled(kernels, states, x):
        for i in range(3):
            x = multiply(x, kernels[i], jax.tree.map(lambda leaf, i=i: leaf[i], states))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    found, expected = (jax.jit(jax.grad(loss, (0, 1)))(kernels, states, batch(0)) for loss in (scanned, unrolled))
    same(found, expected)
    assert len(np.unique(np.asarray(found[1]["scale"])[:, 0])) == 3


def test_shared_state_takes_the_largest_amax_by_maximum_alone():
    kernel = jnp.eye(32, dtype=jnp.bfloat16)
    state = fp8.init_state(RECIPE, kernel)

    def loss(state, convert):
        state = convert(state)
        return sum(jnp.mean(multiply(batch(step), kernel, state).astype(jnp.float32)) for step in (0, 2, 1))

    found = jax.jit(jax.grad(lambda state: loss(state, fp8.by_maximum)))(state)
    largest = jnp.max(jnp.abs(batch(2))).astype(jnp.float32)
    np.testing.assert_array_equal(found["amax_history"][0], [0, 0, 0, largest])
    np.testing.assert_array_equal(found["scale"][0], largest / 448)
    added = jax.grad(lambda state: loss(state, lambda same: same))(state)
    assert added["amax_history"][0, 3] > largest  # a control: float32 adds them up


def test_under_vmap_the_amax_is_that_of_the_batch():
    kernel, xs = jax.random.normal(jax.random.key(1), (32, 48)), jnp.stack([batch(0), batch(3)])
    state = fp8.init_state(RECIPE, kernel)
    found = jax.grad(lambda state: jnp.sum(jax.vmap(loss_of, (None, None, 0))(kernel, state, xs)))(state)
    np.testing.assert_array_equal(found["scale"][0], jnp.max(jnp.abs(xs)).astype(jnp.float32) / 448)


def test_under_vmap_over_states_each_has_its_own_amax():
    """Of an ensemble. A control: with one state for both, it is the larger amax (the test above)."""
    kernels, xs = jax.random.normal(jax.random.key(1), (2, 32, 48)), jnp.stack([batch(0), batch(3)])
    states = jax.vmap(lambda kernel: fp8.init_state(RECIPE, kernel))(kernels)
    found = jax.grad(lambda states: jnp.sum(jax.vmap(loss_of)(kernels, states, xs)))(states)
    expected = [jax.grad(loss_of, 1)(kernels[i], jax.tree.map(lambda x, i=i: x[i], states), xs[i]) for i in (0, 1)]
    np.testing.assert_array_equal(found["scale"], [each["scale"] for each in expected])


def test_without_a_gradient_by_the_state_every_tensor_has_its_own_scale():
    """Else output gradients would keep the scale of 1 and vanish."""
    x, kernel = batch(0), jax.random.normal(jax.random.key(1), (32, 48))
    state = fp8.init_state(RECIPE, kernel)

    def small(kernel, state):
        return loss_of(kernel, state, x) * 2.0**-40  # a factor that underflows

    carried_state._warn_not_carried.cache_clear()
    with pytest.warns(UserWarning, match="not by its state"):
        grad = jax.grad(small)(kernel, state)
    current = fp8.CurrentScaling()

    def of_current(kernel):
        return jnp.mean(multiply(x, kernel, None, current).astype(jnp.float32) ** 2) * 2.0**-40

    same(grad, jax.grad(of_current)(kernel))
    assert np.all(np.any(np.asarray(grad) != 0, axis=0))
    lost, _ = jax.grad(small, (0, 1))(kernel, state)  # a control: the first step by the state, with the first scale
    assert not np.any(np.asarray(lost))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = multiply(x, kernel, state)  # nothing is differentiated, and nothing is lost: no warning
    same(y, multiply(x, kernel, None, current))


def test_the_first_step_of_many_layers_loses_no_gradient():
    """Of a mean over tokens, in whose backward every layer needs the gradient of the next one."""
    x = batch(0)
    kernels = jax.random.normal(jax.random.key(1), (6, 32, 32)) / 6

    def first_step(scale):
        def loss(kernels, states):
            y, _ = lax.scan(lambda x, of: (multiply(x, *of), None), x, (kernels, states))
            return jnp.mean(y.astype(jnp.float32) ** 2) / 4096

        states = jax.vmap(lambda kernel: fp8.init_state(RECIPE, kernel))(kernels)
        states["scale"] = states["scale"].at[:, 2].set(scale)
        grads, new = jax.grad(loss, (0, 1))(kernels, states)
        return [np.any(np.asarray(each)) for each in (*grads, *new["amax_history"][:, 2])]

    assert all(first_step(2.0**-22))
    assert not all(first_step(1.0))  # a control: with the scale of 1 the first layers wait for the last ones


def test_a_state_of_zeros_begins_again():
    """A layer that a step did not run has zeros as its gradient, and the step puts them in the place of the state."""
    x, kernel = batch(0), jax.random.normal(jax.random.key(1), (32, 48))
    zeros = jax.tree.map(jnp.zeros_like, fp8.init_state(RECIPE, kernel))
    fresh = fp8.init_state(RECIPE)
    same(jax.grad(loss_of, (0, 1))(kernel, zeros, x), jax.grad(loss_of, (0, 1))(kernel, fresh, x))
    assert np.all(np.asarray(jax.grad(loss_of, 1)(kernel, zeros, x)["scale"]) > 0)


def test_a_result_that_nobody_uses_leaves_input_and_kernel():
    kernel = jax.random.normal(jax.random.key(1), (32, 48))
    state = fp8.init_state(RECIPE, kernel)
    new = jax.grad(lambda state: jnp.sum(lax.stop_gradient(multiply(batch(0), kernel, state))) + state["scale"][0])(
        state
    )
    np.testing.assert_array_equal(new["amax_history"], jnp.zeros((3, 4)))  # nothing flows back, so nothing is known


def test_gradients_of_tokens_alone_and_of_no_operand():
    kernel, x = jax.random.normal(jax.random.key(1), (32, 48)), batch(0)
    state = fp8.init_state(RECIPE, kernel)
    dx, new = jax.grad(lambda x, state: loss_of(kernel, state, x), (0, 1))(x, state)
    assert dx.dtype == jnp.bfloat16 and np.all(np.any(np.asarray(dx) != 0, axis=1))
    only = jax.grad(lambda state: loss_of(kernel, state, x))(state)
    same(only, new)
