"""A model and a step whose recipes differ are refused, and a model may have several that do not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

X, TX = jnp.ones((16, 16)), fp8.fused_adamw(1e-3)


def whole_step(step, state, _):
    return step(state, X)


def warm_start(step, state, _):
    return step.warm_start(state, X)


def accumulate_step(step, state, pending):
    return step.accumulate_step(state, pending, X, True)


DELAYED, CURRENT, BLOCK = fp8.DelayedScaling, fp8.CurrentScaling, fp8.BlockScaling
OF_TWO_RECIPES = [
    (
        DELAYED(margin=3),
        DELAYED(),
        r"got DelayedScaling\(margin=0\) and, in .*, DelayedScaling\(margin=3\); pass the same",
    ),
    (DELAYED(amax_compute_algo="most_recent"), DELAYED(), "algo='max'.* and, in .*algo='most_recent'"),
    (DELAYED(forget_outliers=True), DELAYED(), "forget_outliers=False.* and, in .*, .*forget_outliers=True"),
    (DELAYED(amax_history_len=3), DELAYED(), "amax_history_len=1024.*(lengths .3.|and, in .*amax_history_len=3)"),
    (CURRENT(), CURRENT(power_2_scale=True), "power_2_scale=True.* and, in .*, .*power_2_scale=False"),
    (BLOCK(), CURRENT(), r"got CurrentScaling\(...\) and, in .*, BlockScaling\(...\)"),
    (None, CURRENT(), r"got CurrentScaling\(...\) and, in all of them, None"),
]


@pytest.mark.parametrize("enter", [whole_step, warm_start, accumulate_step])
@pytest.mark.parametrize(("of_model", "of_step", "message"), OF_TWO_RECIPES)
def test_a_step_has_the_recipe_of_its_model(of_model, of_step, message, enter):
    layer = fp8.Dense(16, recipe=of_model)
    given = fp8.TrainState.create(variables=layer.init(jax.random.key(0), X), tx=TX)
    step = fp8.make_train_step(
        lambda variables, x: jnp.mean(layer.apply(variables, x) ** 2), TX, of_step, warm_start=False
    )
    pending = step.start(given)
    if enter is warm_start and not of_step.has_state:
        assert enter(step, given, pending) is given  # there is nothing to do
        return
    with pytest.raises(ValueError, match=message):
        enter(step, given, pending)


def test_a_warm_start_of_ones_own_has_the_recipe_of_its_model():
    recipe = DELAYED(amax_history_len=2)
    layer = fp8.Dense(16, recipe=recipe)
    variables = layer.init(jax.random.key(0), X)

    def loss(variables, x):
        return jnp.mean(layer.apply(variables, x) ** 2)

    with pytest.raises(ValueError, match=r"the recipe of warm_start must be .* got DelayedScaling\(margin=1\) and"):
        fp8.warm_start(loss, DELAYED(amax_history_len=2, margin=1))(variables, X)
    fp8.warm_start(loss, recipe)(variables, X)


class Mixed(nn.Module):
    """Layers by two recipes without state, and one in bfloat16."""

    @nn.compact
    def __call__(self, x):
        for name, recipe in (("a", CURRENT(power_2_scale=True)), ("b", BLOCK(power_2_scale=False)), ("c", None)):
            x = fp8.Dense(128, recipe=recipe, name=name)(x)
        return x


@pytest.mark.parametrize("recipe", [CURRENT(power_2_scale=True), BLOCK(power_2_scale=False), None], ids=str)
def test_a_model_of_several_recipes_without_state_computes_by_each(recipe):
    """Also where the step casts the weights of its own recipe for all microbatches."""
    x = jax.random.normal(jax.random.key(0), (256, 128))
    variables = Mixed().init(jax.random.key(1), x)

    def loss(variables, x):
        return jnp.mean(Mixed().apply(variables, x).astype(jnp.float32) ** 2)

    found = []
    for cache_weights in (True, False):
        given = fp8.TrainState.create(variables=variables, tx=TX)
        step = fp8.make_train_step(loss, TX, recipe, 2, cache_weights=cache_weights)
        found.append(float(step(given, x)[1]["loss"]))
    assert found[0] == found[1]
