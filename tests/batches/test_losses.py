"""What a loss and a batch may be, on one device and on each of several, and what is refused in one sentence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODULE, TX = fp8.Dense(16, recipe=RECIPE), optax.adam(1e-3)
X = jnp.ones((16, 16))
VARIABLES = jax.jit(MODULE.init)(jax.random.key(0), X)


def loss_fn(variables, x):
    return jnp.mean(jnp.square(MODULE.apply(variables, x).astype(jnp.float32)))


def state():
    return fp8.TrainState.create(variables=VARIABLES, tx=TX)


def make(loss_fn, **options):
    return fp8.make_train_step(loss_fn, TX, RECIPE, **options)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: (loss, {}), "must return a scalar, got a tuple; return the loss alone, or pass has_aux=True\n"),
        (lambda loss: {"loss": loss}, "a floating point scalar, got a dict with 'loss'"),
        (lambda loss: None, "a floating point scalar, got None"),
        (lambda loss: (loss * 4).astype(jnp.int32), r"a floating point scalar, got int32\[\]"),
        (lambda loss: loss[None], r"a floating point scalar, got float32\[1\]"),
        (lambda loss: loss.astype(fp8.E4M3), r"a floating point scalar, got float8_e4m3fn\[\]"),
    ],
)
def test_what_a_loss_returns_on_each_device(returned, message):
    """A share of an integer, or of a pair, would be another thing."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            fp8.value_and_grad(lambda v, x: returned(loss_fn(v, x)), parallel=mesh), VARIABLES, jnp.ones((32, 16))
        )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("returned", [lambda loss: 3.0, lambda loss: 0 * loss.astype(jnp.bfloat16) + 3])
def test_a_loss_may_be_a_number_or_in_16_bits(returned, microbatches):
    x = jnp.ones((32, 16))
    _, metrics = make(lambda v, x: returned(loss_fn(v, x)), microbatches=microbatches)(state(), x)
    assert metrics["loss"].dtype == jnp.float32 and float(metrics["loss"]) == 3


class Losses:
    def of_method(self, variables, x):
        return loss_fn(variables, x)

    @staticmethod
    def by_name(variables, *, batch):
        return loss_fn(variables, batch)

    @staticmethod
    def drawing(variables, x, rngs):
        return loss_fn(variables, x)


RNGS = {"dropout": jax.random.key(0)}


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            Losses.by_name,
            {},
            r"loss_fn must take \(variables, batch\), got one that takes \(variables, \*, batch\); bind",
        ),
        (lambda variables: 1.0, {}, r"must take \(variables, batch\), got one that takes \(variables\);"),
        (
            Losses.drawing,
            {},
            r"got one that takes \(variables, x, rngs\); .* and pass rngs to make_train_step if it",
        ),
        (loss_fn, {"rngs": RNGS}, r"must take \(variables, batch, rngs\), got one that takes \(variables, x\)"),
        (functools.partial(Losses.drawing, rngs=None), {"rngs": {}}, "rngs must be a dict of random keys"),
    ],
)
def test_what_a_loss_takes(loss, options, message):
    with pytest.raises(ValueError, match=message):
        make(loss, **options)


@pytest.mark.parametrize(
    "loss",
    [
        Losses().of_method,
        functools.partial(Losses.drawing, rngs=None),
        jax.jit(loss_fn),
        lambda *given: loss_fn(*given),
    ],
)
def test_losses_that_are_no_plain_functions(loss):
    assert make(loss).trace(state(), X)


@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", np.array(["a"] * 16), np.array([None] * 16), object()],
    ids="text bytes texts nothings object".split(),
)
def test_a_batch_of_no_numbers(leaf):
    step, batch = make(lambda v, batch: loss_fn(v, batch["x"])), {"x": X, "y": [None, leaf]}
    for call in (step, step.diagnose, step.warm_start, step.place):
        with pytest.raises(
            ValueError, match=r"batch must hold arrays of numbers, got .* at batch\['y'\]\[1\]; leave it out"
        ):
            call(state(), batch)
    assert jnp.isfinite(step(state(), {"x": X, "y": [None, 1.0, True, np.int8(1), jax.random.key(0)]})[1]["loss"])
