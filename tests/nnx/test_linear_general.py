"""A linear map over several dims is that over one, with other shapes."""

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

X = jax.random.normal(jax.random.key(0), (4, 2, 16, 32), jnp.bfloat16)
CASES = {
    "one to one": (32, 64, -1),
    "one to several": (32, (4, 16), -1),
    "several to one": ((16, 32), 64, (-2, -1)),
    "several to several": ((2, 32), (4, 16), (1, -1)),
}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_what_flax_computes(case, recipe):
    sizes, axis = case[:2], case[2]
    options = {"axis": axis, "dtype": jnp.bfloat16, "bias_init": jax.nn.initializers.normal(1.0)}
    model = fp8.nnx.LinearGeneral(*sizes, recipe=recipe, rngs=nnx.Rngs(0), **options)
    theirs = nnx.LinearGeneral(*sizes, rngs=nnx.Rngs(0), **options)
    assert_same(pure(nnx.state(model, nnx.Param)), pure(nnx.state(theirs, nnx.Param)))
    y, expected = model(X), theirs(X)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    reference.assert_close(y, expected, "bfloat16" if recipe is None else "linear")


def test_gradients_and_state_are_those_of_the_product_of_matrices():
    general = fp8.nnx.LinearGeneral((16, 32), (4, 8), axis=(-2, -1), recipe=RECIPE, rngs=nnx.Rngs(0))
    linear = fp8.nnx.Linear(512, 32, recipe=RECIPE, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (16, 16, 32), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(2), (16, 32))
    results = []
    for model, rows in ((general, x), (linear, x.reshape(16, 512))):
        loss = lambda model, rows: jnp.sum(model(rows).reshape(16, 32).astype(jnp.float32) * weights)  # noqa: E731
        value, grads = nnx.jit(fp8.nnx.value_and_grad(loss))(model, rows)
        fp8.nnx.update_state(model)
        grads = {name: leaf.reshape(-1) for name, leaf in pure(grads).items()}
        results.append((value, grads, fp8.nnx.fp8_state(model)))
    (value, grads, state), (expected, expected_grads, expected_state) = results
    assert value == expected and np.any(grads["kernel"])
    assert_same(grads, expected_grads)
    assert_same(state["~product"], expected_state)


def test_only_a_matrix_is_cast_for_a_cache():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.matrix = fp8.nnx.LinearGeneral(32, 32, recipe=RECIPE, rngs=rngs)
            self.heads = fp8.nnx.LinearGeneral(32, (2, 16), recipe=RECIPE, rngs=rngs)

        def __call__(self, x):
            return self.heads(self.matrix(x)).reshape(x.shape)

    variables, merge = fp8.nnx.split(Model())
    assert sorted(fp8.cast_weights(variables, RECIPE)) == ["cast_by", "matrix", "params_version"]
    tx, losses = fp8.fused_adamw(1e-2), []
    for cache_weights in (True, False):
        step = fp8.make_train_step(
            lambda v, x: jnp.mean(jnp.square(merge(v)(x) - x).astype(jnp.float32)),
            tx,
            RECIPE,
            microbatches=2,
            cache_weights=cache_weights,
        )
        state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=tx)
        for _ in range(3):
            state, metrics = step(state, X)
        losses.append(metrics["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda **own: fp8.nnx.LinearGeneral(32, (3, 8), **own), r"FP8 needs out features divisible by 16, got 24"),
        (lambda **own: fp8.nnx.LinearGeneral((2, 32), 32, **own), r"axis must have a dim for each of in_features"),
        (lambda **own: fp8.nnx.LinearGeneral(64, 32, **own)(X), r"needs an array whose dims \(-1,\) are \(64,\), got"),
        (lambda **own: fp8.nnx.LinearGeneral(32, 32, **own)(X, out_sharding="x"), r"out_sharding must be None"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(recipe=RECIPE, rngs=nnx.Rngs(0))
