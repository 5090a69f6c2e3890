"""Layers of a pipeline with GEMMs in a branch, under `jax.vmap`, where no Ref is, and in an `nn.scan`: a step is that
without `pipe`.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hybrid import SHOWING, train
from pipelines import CURRENT, DELAYED, WIDTH, assert_is_same_step, dense, loss_of, rows, variables_of

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe
from jax_fp8.distributed import layer_work
from jax_fp8.grads.tape import GradientTape

WEIGHTS = "params", "fp8", "fp8_cache"


class Product(nn.Module):
    recipe: Recipe

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(fp8.Dense(WIDTH, recipe=self.recipe, name="dense")(x)), None


class InBranch(nn.Module):
    recipe: Recipe = DELAYED

    @nn.compact
    def __call__(self, x):
        product = Product(self.recipe, name="product")
        if self.is_initializing():
            return product(x, None)[0]
        return x + jax.lax.cond(jnp.sum(x) < 1e6, lambda x: product(x, None)[0], lambda x: x, x)


class InVmap(nn.Module):
    recipe: Recipe = DELAYED

    @nn.compact
    def __call__(self, x):
        axes, rngs = dict.fromkeys(WEIGHTS), {"params": False}
        halves = nn.vmap(Product, variable_axes=axes, split_rngs=rngs, in_axes=(0, None), axis_size=2)
        y, _ = halves(self.recipe, name="product")(x.reshape(2, -1, WIDTH), None)
        return x + y.reshape(x.shape)


class InScan(nn.Module):
    recipe: Recipe = DELAYED

    @nn.compact
    def __call__(self, x):
        twice = nn.scan(Product, variable_broadcast=WEIGHTS, split_rngs={"params": False}, length=2)
        return x + twice(self.recipe, name="product")(x, None)[0]


def steps(layer: Callable[..., nn.Module], schedule: str, recipe: Recipe = DELAYED) -> list:
    """State and loss after a step with `pipe`, and after one without."""
    made = {f"layer_{number}": lambda name: layer(recipe, name=name) for number in range(2)}
    parts = {"first": dense(None)} | made | {"last": dense(recipe)}
    state = fp8.TrainState.create(variables=variables_of(parts), tx=SHOWING)
    found = []
    for options in ({"axes": {"pipe": 2}, "schedule": schedule}, {}):
        states, losses = train(loss_of(parts), state, rows(), recipe, microbatches=2, warm_start=False, **options)
        found += [states[-1], losses[-1]]
    return found


CASES = {
    "in a branch": (InBranch, "1f1b", DELAYED),
    "in a branch, zero-bubble": (InBranch, "zero-bubble", DELAYED),
    "in a vmap": (InVmap, "1f1b", DELAYED),
    "in a vmap, current": (InVmap, "1f1b", CURRENT),
    "in a scan": (InScan, "1f1b", DELAYED),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_without_pipe(case):
    assert_is_same_step(*steps(*CASES[case]))


def test_amaxes_that_are_not_taken_from_cotangents_are_noticed(monkeypatch):
    """Negative control."""

    class Forgetful(GradientTape):
        def receive(self, rows: jax.Array) -> None:
            super().receive(jnp.zeros_like(rows))

    monkeypatch.setattr(layer_work, "GradientTape", Forgetful)
    with pytest.raises(AssertionError):
        assert_is_same_step(*steps(InBranch, "1f1b"))
