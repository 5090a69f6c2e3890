"""What layers say when their loss is traced: how params may be split, what is in FP8, and whether the loss is whole."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import gpt, make_mesh, run, tokens

import jax_fp8 as fp8
from jax_fp8.core.shards import ParamSharding
from jax_fp8.grads.loss_trace import LossTrace

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODEL = gpt(RECIPE, num_layers=1)
LOSS, TX = fp8.next_token_loss(MODEL), optax.sgd(0.1)
BATCH = tokens(4)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0), BATCH[:, :-1])
X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)


def test_layers_say_what_they_are_when_they_are_traced():
    of_loss = LossTrace.from_function(LOSS, SHAPES, BATCH)
    of_init = LossTrace.from_function(MODEL.init, jax.random.key(0), BATCH[:, :-1])
    assert (of_loss.declared, of_loss.gemms) == (of_init.declared, of_init.gemms)
    assert set(of_loss.gemms.values()) == {RECIPE} and not of_loss.changed
    assert tuple(of_loss.gemms) == (
        ("layer_0", "attention", "query+key+value"), ("layer_0", "attention", "out"),
        ("layer_0", "mlp", "up"), ("layer_0", "mlp", "down"),
    )  # fmt: skip
    attention = ("layer_0", "attention")
    assert of_loss.declared[*attention, "out", "kernel"] == ParamSharding(-2, 128, by_rule=(-1, -2))
    key = *attention, "key", "kernel"
    of_bias = ParamSharding(
        -1, 4, "key and value heads", or_whole=True, by_rule=(-1,), columns_of=key, logical_name="kv_heads"
    )
    assert of_loss.declared[*attention, "key", "bias"] == of_bias
    assert of_loss.declared["embedding",].splits_rows
    assert of_loss.gemms_of({(*attention, "out", "kernel"): None}, SHAPES["fp8"]) == {(*attention, "out"): RECIPE}
    plain = LossTrace.from_function(gpt(None, num_layers=1).init, jax.random.key(0), BATCH[:, :-1])
    assert plain.gemms == {} and plain.declared["layer_0", "mlp", "up", "kernel"].dtype == jnp.bfloat16


def test_a_jitted_loss_says_the_same_the_second_time():
    loss_fn = jax.jit(LOSS)
    first, again = (LossTrace.from_function(loss_fn, SHAPES, BATCH) for _ in range(2))
    assert first == again == LossTrace.from_function(LOSS, SHAPES, BATCH)


class Columns(nn.Module):
    """A layer by columns that none by rows follows, or one does."""

    is_followed: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.relu(fp8.Dense(32, recipe=RECIPE, tensor_split="columns", name="up")(x))
        return fp8.Dense(32, recipe=RECIPE, tensor_split="rows", name="down")(y) if self.is_followed else y


def squares(apply, variables, x):
    return jnp.mean(jnp.square(apply(variables, x).astype(jnp.float32)))


def in_chunks(apply, variables, x):
    return jnp.mean(jax.lax.map(lambda rows: squares(apply, variables, rows), x.reshape(2, -1, 32)))


def with_penalty(apply, variables, x):
    return squares(apply, variables, x) + jnp.mean(jnp.square(variables["params"]["up"]["kernel"]))


@pytest.mark.parametrize("of", [squares, in_chunks, with_penalty])
@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "followed"])
def test_a_loss_of_what_is_still_split(is_followed, of):
    """Each device of `tensor` would have a loss of its own columns. One of what rows have added up is as on one device;
    a penalty of a kernel that is split never is.
    """
    model = Columns(is_followed)

    def loss_fn(variables, x):
        return of(model.apply, variables, x)

    step = fp8.make_train_step(loss_fn, TX, RECIPE, parallel=make_mesh(tensor=2), warm_start=False)
    state = step.init_state(model.init, jax.random.key(0), X)
    if is_followed and of is not with_penalty:
        of_one = model.init(jax.random.key(0), X)
        np.testing.assert_allclose(run(step, state, X, steps=1)[1], [jax.jit(loss_fn)(of_one, X)], 1e-3)
        return
    with pytest.raises(ValueError, match=r"the same on all devices of tensor=2, got one of what is split .*; after a"):
        step(state, X)
