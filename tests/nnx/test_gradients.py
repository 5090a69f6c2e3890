"""Amaxes of NNX models reach their state under everything that NNX does to a model, and never the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, MLP, RECIPE, X, assert_same, loss, make, mean_square, pure, staged, values

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.core import fp8_gemm
from jax_fp8.kernels import update_state as kernel_of_state

pytestmark = pytest.mark.versions

differentiate = nnx.jit(fp8.nnx.value_and_grad(loss))


def test_gradients_are_params_alone_and_amaxes_those_of_the_pass():
    model = make()
    before = values(model)
    _, grads = differentiate(model, X)
    assert jax.tree.structure(pure(grads)) == jax.tree.structure(values(model)[0])
    assert_same(values(model)[0], before[0])
    found = staged(model)
    assert all(np.all(amaxes > 0) for amaxes in found.values())
    np.testing.assert_array_equal(found["first"][:2], [reference.amax(X), reference.amax(model.first.kernel[...])])
    assert_same(fp8.nnx.fp8_state(model)["first"]["scale"], before[1]["first"]["scale"])  # until update_state
    assert not hasattr(model.first.fp8, "recorder") and model.first.fp8.path is None


def test_a_pass_without_a_recorder_leaves_the_state_alone(warns_anew):
    """The negative of all tests here: what nobody records is not staged, whatever else is the same."""
    model = make()
    with pytest.warns(UserWarning, match="differentiated without"):
        nnx.jit(nnx.value_and_grad(loss))(model, X)
    model(X)
    assert not any(np.any(amaxes) for amaxes in staged(model).values())


@pytest.fixture
def warns_anew():
    """The warning of plain gradients comes once a process."""
    fp8_gemm._warn_unrecorded.cache_clear()


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
def test_plain_gradients_are_right_and_train_mode_stages_the_forward():
    """A tiny loss: at the scale of 1 that a state begins with, its gradients would vanish."""
    model, other = make(), make()
    fp8.nnx.warm_start(lambda m, x: 2.0**-30 * loss(m, x))(other, X)
    _, grads = nnx.value_and_grad(lambda model, x: 2.0**-30 * loss(model, x))(model, X)
    _, expected = fp8.nnx.value_and_grad(lambda model, x: 2.0**-30 * loss(model, x))(other, X)
    for name in ("first", "second"):
        reference.assert_close(pure(grads)[name]["kernel"], pure(expected)[name]["kernel"], "block_gradient")
    model.train()
    nnx.value_and_grad(loss)(model, X)
    found = staged(model)
    np.testing.assert_array_equal(found["first"][0], reference.amax(X))
    assert all(amaxes[2] == 0 for amaxes in found.values())
    fp8.nnx.update_state(model)
    model.eval()
    after = values(model)
    model(8 * X)
    assert_same(values(model), after)


def test_a_cold_scale_is_what_a_warm_start_prevents():
    """The control of the test above: recorded, and without a history."""
    _, grads = fp8.nnx.value_and_grad(lambda model, x: 2.0**-40 * loss(model, x))(make(), X)
    assert not np.any(pure(grads)["first"]["kernel"])


def test_a_warm_start_is_that_of_linen():
    module = fp8.Dense(FEATURES, recipe=RECIPE)
    variables = module.init(jax.random.key(0), X)
    model = fp8.nnx.Linear(FEATURES, FEATURES, recipe=RECIPE, rngs=nnx.Rngs(0))
    nnx.update(model, variables["params"])
    fp8.nnx.warm_start(loss)(model, X)
    expected = fp8.warm_start(lambda v, x: mean_square(module.apply(v, x), x), RECIPE)(variables, X)
    assert_same(fp8.nnx.fp8_state(model), expected)
    fp8.nnx.warm_start(loss)(model, 2 * X)  # what has a history keeps it
    assert_same(fp8.nnx.fp8_state(model), expected)


def test_microbatches_stage_the_maximum():
    apart = [make(), make()]
    halves = X[:32], 3 * X[32:]
    for model, half in zip(apart, halves, strict=True):
        differentiate(model, half)
    model = make()
    for half in halves:
        differentiate(model, half)
    found, each = staged(model), [staged(one) for one in apart]
    for name in found:
        np.testing.assert_array_equal(found[name], np.maximum(each[0][name], each[1][name]))
        assert np.any(found[name] != each[1][name]) or np.any(found[name] != each[0][name])


def test_a_shared_layer_stages_the_maximum_over_its_uses():
    class Twice(nnx.Module):
        def __init__(self):
            self.layer = fp8.nnx.Linear(FEATURES, FEATURES, recipe=RECIPE, rngs=nnx.Rngs(0))
            self.again = self.layer

        def __call__(self, x):
            return self.again(8 * jnp.tanh(self.layer(x)))

    model = Twice()
    differentiate(model, X)
    assert list(staged(model)) == ["again"] or list(staged(model)) == ["layer"]
    (found,) = staged(model).values()
    assert found[0] == max(reference.amax(X), reference.amax(8 * jnp.tanh(model.layer(X))))


def test_aux_other_arguments_and_other_variables_go_as_in_nnx(warns_anew):
    class Counting(nnx.Module):
        def __init__(self):
            self.mlp, self.norm = make(), nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.mlp(self.dropout(self.norm(x)))

    def with_aux(model, x, scale):
        y = model(x)
        return scale * mean_square(y, x), {"mean": jnp.mean(y)}

    model, theirs = Counting(), Counting()
    (found, aux), grads = nnx.jit(fp8.nnx.value_and_grad(with_aux, has_aux=True))(model, X, scale=jnp.float32(2))
    expected = nnx.jit(nnx.value_and_grad(with_aux, has_aux=True))
    with pytest.warns(UserWarning, match="differentiated without"):
        (value, their_aux), their_grads = expected(theirs, X, jnp.float32(2))
    assert found == value and aux["mean"] == their_aux["mean"]
    assert jax.tree.structure(pure(grads)) == jax.tree.structure(pure(their_grads))
    assert model.calls[...] == 1
    assert_same(*(pure(nnx.state(one, nnx.BatchStat)) for one in (model, theirs)))
    assert_same(*(pure(nnx.state(one, nnx.RngCount)) for one in (model, theirs)))


def test_what_is_differentiated_is_said_as_in_nnx():
    model = make()
    kernels = nnx.DiffState(0, nnx.PathContains("kernel"))
    _, grads = fp8.nnx.value_and_grad(loss, argnums=kernels)(model, X)
    assert pure(grads)["first"].keys() == {"kernel"}
    _, (grads, dx) = fp8.nnx.value_and_grad(loss, argnums=(0, 1))(model, X)
    assert dx.shape == X.shape and pure(grads)["first"].keys() == {"kernel", "bias"}


def test_two_models_and_two_recipes():
    other = fp8.DelayedScaling(amax_history_len=8, margin=1)
    models = make(), MLP(nnx.Rngs(1), recipe=other)
    nnx.jit(fp8.nnx.value_and_grad(lambda a, b, x: loss(a, x) + loss(b, x), argnums=(0, 1)))(*models, X)
    for model, recipe in zip(models, (RECIPE, other), strict=True):
        expected = fp8.update_state(fp8.nnx.fp8_state(model), recipe)
        fp8.nnx.update_state(model)
        assert_same(fp8.nnx.fp8_state(model), expected)
    assert models[1].first.fp8.scale[0] == 2 * models[0].first.fp8.scale[0]


def test_a_loss_that_fails_leaves_the_model_as_it_was():
    model = make()
    before = values(model)
    with pytest.raises(ZeroDivisionError):
        fp8.nnx.value_and_grad(lambda model, x: loss(model, x) / (1 // 0))(model, X)
    assert_same(values(model), before)
    assert not hasattr(model.first.fp8, "recorder")
    differentiate(model, X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.nnx.value_and_grad(3), "loss_fn must be a function of a model, got 3"),
        (lambda: fp8.nnx.value_and_grad(loss, has_aux=1), "has_aux must be True or False, got 1"),
        (lambda: fp8.nnx.warm_start(None), "loss_fn must be a function of a model, got None"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("tx", [optax.adamw(1e-2), fp8.fused_adamw(1e-2)], ids=["optax", "fused"])
def test_a_training_step_in_one_program_with_one_update_of_all_state(tx, monkeypatch):
    calls = []
    update = kernel_of_state._update
    monkeypatch.setattr(kernel_of_state, "_update", lambda *args, **kw: calls.append(1) or update(*args, **kw))
    model = make()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = fp8.nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return value

    losses = [float(step(model, optimizer, X)) for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    assert len(calls) == 1
    assert HIDDEN == model.first.out_features
