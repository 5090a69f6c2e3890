"""Layers under jax's and Flax's transformations: `vmap`, `cond`, `switch`, `scan`, their Flax forms, and microbatches.

The oracle is the same computation written out. Every product is the same, so losses agree to the last bits of a mean,
gradients and amaxes bit for bit where the order of additions is the same. Amaxes are the maximum over the mapped axis
and over the branch that ran; the other branch leaves its state alone.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.core.state import gemm_states

DELAYED = fp8.DelayedScaling(amax_history_len=4)
# Delayed scaling is what transformations can lose: its state, and what a backward pass leaves.
RECIPES = [
    pytest.param(DELAYED, id="delayed", marks=pytest.mark.versions),
    pytest.param(fp8.CurrentScaling(), id="current"),
    pytest.param(None, id="bfloat16"),
]
COMBINED = ("vmap of jit", "vmap of remat", "vmap of vmap", "cond of remat", "switch")  # of others, for one version


def each(ways, recipes) -> list:
    """Every way with every recipe."""
    return [
        pytest.param(how, *recipe.values, id=f"{how}-{recipe.id}", marks=() if how in COMBINED else recipe.marks)
        for how in ways
        for recipe in recipes
    ]


X = jax.random.normal(jax.random.key(0), (2, 16, 32))
GROWING = X * jnp.array([1.0, 3.0])[:, None, None]


class Two(nn.Module):
    """Two layers, and how they are put together."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling | None
    how: str

    def setup(self):
        self.a = fp8.Dense(32, recipe=self.recipe)
        self.b = fp8.LayerNormMLP(64, recipe=self.recipe)

    def __call__(self, x, which=True):
        if self.is_initializing():
            return self.b(self.a(x))
        if self.how == "nn.cond":
            return nn.cond(which, lambda m, x: m.b(m.a(m.a(x))), lambda m, x: m.b(x), self, x)
        return COMPUTE[self.how](self.a, self.b, x, which)


COMPUTE = {
    "vmap": lambda a, b, x, which: jax.vmap(lambda x: b(a(x)))(x),
    "vmap of jit": lambda a, b, x, which: jax.vmap(jax.jit(lambda x: b(a(x))))(x),
    "vmap of remat": lambda a, b, x, which: jax.vmap(jax.checkpoint(lambda x: b(a(x))))(x),
    "vmap of vmap": lambda a, b, x, which: jax.vmap(jax.vmap(lambda x: b(a(x))))(x[None])[0],
    "written out": lambda a, b, x, which: jnp.stack([b(a(part)) for part in x]),
    "cond": lambda a, b, x, which: jax.lax.cond(which, lambda x: b(a(a(x))), lambda x: b(x), x),
    "switch": lambda a, b, x, which: jax.lax.switch(
        which * 1, [lambda x: b(x), lambda x: b(a(a(x))), lambda x: 2 * a(x)], x
    ),
    "cond of remat": lambda a, b, x, which: jax.lax.cond(
        which, jax.checkpoint(lambda x: b(a(a(x)))), lambda x: b(x), x
    ),
    "if": lambda a, b, x, which: b(a(a(x))) if which else b(x),
    "scan": lambda a, b, x, which: jax.lax.scan(lambda x, _: (b(a(x)), None), x.astype(jnp.bfloat16), length=2)[0],
    "loop": lambda a, b, x, which: b(a(b(a(x.astype(jnp.bfloat16))))),
}  # fmt: skip
BATCHED = ["vmap", "vmap of jit", "vmap of remat", "vmap of vmap"]
BRANCHING = ["cond", "switch", "cond of remat", "nn.cond"]


def loss_of(recipe, how):
    def loss(variables, x, which=True):
        y = Two(recipe, how).apply(variables, x, which).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)) / 64

    return loss


@functools.cache
def variables_of(recipe):
    variables = jax.jit(Two(recipe, "if").init)(jax.random.key(1), X)
    # Scales that are not one, so that a lost scale is seen.
    return fp8_scales_times(variables, 0.5)


def fp8_scales_times(variables, factor):
    def halve(path, leaf):
        return leaf * factor if path[0].key == "fp8" and path[-1].key == "scale" else leaf

    return jax.tree_util.tree_map_with_path(halve, variables)


@functools.cache
def differentiated(recipe, how, static):
    """One program serves both branches, unless which one is static."""
    return jax.jit(fp8.value_and_grad(loss_of(recipe, how)), static_argnums=(2,) if static else ())


def differentiate(recipe, how, *args, static=False):
    return differentiated(recipe, how, static)(variables_of(recipe), *args)


@functools.cache
def of_branch(recipe, which):
    """What a layer in a branch is compared with."""
    return differentiate(recipe, "if", X[0], which, static=True)


@functools.cache
def of_each(recipe):
    """What a layer under `vmap` is compared with."""
    return differentiate(recipe, "written out", GROWING)


def assert_same(got, want, exact_grads=True):
    (loss, grads, state), (want_loss, want_grads, want_state) = got, want
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, gradient), expected in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
    ):
        assert np.any(expected), f"{path}: a gradient of zeros shows nothing"
        if exact_grads:
            np.testing.assert_array_equal(gradient, expected, err_msg=str(path))
        else:  # two sums of products, added in another order
            np.testing.assert_allclose(
                gradient, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)), err_msg=str(path)
            )
    jax.tree.map(np.testing.assert_array_equal, state, want_state)


def staged(state):
    return np.concatenate([np.ravel(gemm["amax_history"][..., 0]) for gemm in gemm_states(state)])


@pytest.mark.parametrize(("how", "recipe"), each(BATCHED, RECIPES[:2]))
def test_a_layer_under_vmap_is_the_layer_called_for_each(how, recipe):
    got = differentiate(recipe, how, GROWING)
    assert_same(got, of_each(recipe), exact_grads=False)
    if recipe is DELAYED:
        assert np.all(staged(got[2]) > 0)


@pytest.mark.parametrize("which", [True, False])
@pytest.mark.parametrize(("how", "recipe"), each(BRANCHING, RECIPES))
def test_a_layer_in_a_branch_is_the_layer(how, which, recipe):
    got = differentiate(recipe, how, X[0], which)
    want = of_branch(recipe, which)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])
    if recipe is DELAYED:  # the branch that did not run leaves no amax
        assert np.all(staged({"a": got[2]["a"]}) > 0) == which
        assert np.all(staged({"b": got[2]["b"]}) > 0)


@functools.cache
def after_microbatches(recipe, how):
    """The state after a step of two microbatches."""
    tx = optax.sgd(0.5)
    # A copy for itself: the step donates its state.
    state = fp8.TrainState.create(variables=jax.tree.map(jnp.copy, variables_of(recipe)), tx=tx)
    step = fp8.make_train_step(loss_of(recipe, how), tx, recipe, microbatches=2)
    return step(state, jnp.concatenate([X[0], 3 * X[1]]))[0]


@pytest.mark.parametrize(("how", "recipe"), each(["cond", "switch", "nn.cond"], RECIPES[:2]))
def test_microbatches_through_branches(how, recipe):
    """Here the gradients of microbatches are added after the GEMMs, in the oracle by them."""
    got, want = after_microbatches(recipe, how), after_microbatches(recipe, "if")
    assert_close(got.params, want.params)
    jax.tree.map(np.testing.assert_array_equal, got.fp8, want.fp8)
    moved = jax.tree.map(lambda a, b: np.any(a != b), got.params, variables_of(recipe)["params"])
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_a_layer_used_in_every_turn_of_a_scan(recipe):
    got, want = (differentiate(recipe, how, X[0]) for how in ("scan", "loop"))
    assert_same(got, want, exact_grads=False)


class Mapped(nn.Module):
    """Layers stacked by Flax: experts or an ensemble (each its own weights and scales), or one layer for a batch."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling | None
    axes: dict
    lift: str = "vmap"
    num: int = 2

    @nn.compact
    def __call__(self, x):
        if self.lift == "vmap":
            lifted = nn.vmap(fp8.Dense, variable_axes=self.axes, split_rngs={"params": self.axes["params"] is not None})
            return lifted(32, recipe=self.recipe, dtype=jnp.float32, name="dense")(x)
        axes = {name: axis for name, axis in self.axes.items() if axis is not None}
        broadcast = [name for name, axis in self.axes.items() if axis is None]
        body = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes=axes,
            variable_broadcast=broadcast or False,
            split_rngs={"params": not broadcast},
            length=self.num,
        )
        return body(fp8.Dense(32, recipe=self.recipe, dtype=jnp.float32, name="dense"), x, None)[0]


OWN, SHARED = {"params": 0, "fp8": 0}, {"params": None, "fp8": None}


def mapped_loss(model):
    def loss(variables, x):
        return jnp.sum(jnp.sin(model.apply(variables, x)) * jnp.linspace(-1.0, 1.0, 32)) / 64

    return loss


@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("axes", [OWN, SHARED], ids=["experts", "shared"])
def test_flax_vmap_trains_like_layers_written_out(axes, recipe, microbatches):
    """One optimizer step by plain SGD; for experts against a step of each expert alone."""
    x = jax.random.normal(jax.random.key(3), (2, 32, 32)) * jnp.array([1.0, 5.0])[:, None, None]
    model = Mapped(recipe, axes)
    variables = model.init(jax.random.key(1), x)
    tx = optax.sgd(0.5)

    def step(loss, variables, batch):
        state = fp8.TrainState.create(variables=variables, tx=tx)
        train = fp8.make_train_step(loss, tx, recipe, microbatches, warm_start=microbatches > 1)  # once with, once not
        return train(state, batch)

    def of_mapped(variables, batch):
        return mapped_loss(model)(variables, jnp.moveaxis(batch, 1, 0))

    state, metrics = step(of_mapped, variables, jnp.moveaxis(x, 0, 1))
    moved = jax.tree.map(lambda a, b: jnp.any(a != b), state.params, variables["params"])
    assert all(jax.tree.leaves(moved))
    if axes is SHARED:
        layer = fp8.Dense(32, recipe=recipe, dtype=jnp.float32)

        def written_out(variables, batch):
            one = {name: tree["dense"] for name, tree in variables.items()}
            y = jnp.stack([layer.apply(one, batch[:, i]) for i in range(2)])
            return jnp.sum(jnp.sin(y) * jnp.linspace(-1.0, 1.0, 32)) / 64

        expected, expected_metrics = step(written_out, variables, jnp.moveaxis(x, 0, 1))
        assert_close(state.params, expected.params)
        jax.tree.map(np.testing.assert_array_equal, state.fp8, expected.fp8)
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
        return
    for expert in range(2):
        own = jax.tree.map(lambda leaf, expert=expert: leaf[expert], variables)
        single = Mapped(recipe, OWN, num=1)

        def of_one(variables, batch, single=single):
            stacked = jax.tree.map(lambda leaf: leaf[None], variables)
            return mapped_loss(single)(stacked, batch[None])

        expected, _ = step(of_one, own, x[expert])
        assert_close(jax.tree.map(lambda leaf, expert=expert: leaf[expert], state.params), expected.params)
        jax.tree.map(
            lambda leaf, want, expert=expert: np.testing.assert_array_equal(leaf[expert], want), state.fp8, expected.fp8
        )


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b))), got, want)


@pytest.mark.versions
def test_an_ensemble_of_training_runs_keeps_its_amaxes_apart():
    """`vmap` around `value_and_grad`: mapped state has amaxes of its own, shared state the maximum."""
    layer = fp8.Dense(32, recipe=DELAYED, dtype=jnp.float32)
    x = X * jnp.array([1.0, 3.0])[:, None, None]

    def loss(variables, x):
        return jnp.sum(jnp.sin(layer.apply(variables, x)))

    each = [layer.init(jax.random.key(key), x[0]) for key in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    got = jax.jit(jax.vmap(fp8.value_and_grad(loss)))(stacked, x)
    alone = [jax.jit(fp8.value_and_grad(loss))(variables, x[i]) for i, variables in enumerate(each)]
    assert_close(got[1], jax.tree.map(lambda *leaves: jnp.stack(leaves), *(result[1] for result in alone)))
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(result[2] for result in alone))
    jax.tree.map(np.testing.assert_array_equal, got[2], want)

    per_example = jax.jit(jax.vmap(fp8.value_and_grad(loss), in_axes=(None, 0)))(each[0], x)
    alone = [jax.jit(fp8.value_and_grad(loss))(each[0], part) for part in x]
    assert_close(per_example[1], jax.tree.map(lambda *leaves: jnp.stack(leaves), *(result[1] for result in alone)))
    for i in range(2):  # shared state: the maximum over the batch, the same for each
        maximum = jax.tree.map(jnp.maximum, alone[0][2], alone[1][2])
        jax.tree.map(lambda leaf, want, i=i: np.testing.assert_array_equal(leaf[i], want), per_example[2], maximum)


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_a_layer_shared_over_flax_scan(recipe):
    model = Mapped(recipe, SHARED, lift="scan")
    variables = model.init(jax.random.key(1), X[0])
    got = jax.jit(fp8.value_and_grad(mapped_loss(model)))(variables, X[0])
    layer = fp8.Dense(32, recipe=recipe, dtype=jnp.float32)

    def written_out(variables, x):
        one = {name: tree["dense"] for name, tree in variables.items()}
        return jnp.sum(jnp.sin(layer.apply(one, layer.apply(one, x))) * jnp.linspace(-1.0, 1.0, 32)) / 64

    want = jax.jit(fp8.value_and_grad(written_out))(variables, X[0])
    assert_same(got, want, exact_grads=False)


@pytest.mark.versions
def test_calibration_of_a_layer_that_a_batch_shares():
    """A forward pass alone stages the maximum over the mapped axis."""
    x = X * jnp.array([1.0, 3.0])[:, None, None]
    shared, own = Mapped(DELAYED, SHARED), Mapped(DELAYED, OWN)
    for model in (shared, own):
        variables = model.init(jax.random.key(1), x)
        _, state = model.apply(variables, x, mutable=["fp8"])
        seen = state["fp8"]["dense"]["amax_history"][..., 0, 0]
        largest = jnp.max(jnp.abs(x), axis=(1, 2))
        np.testing.assert_array_equal(seen, jnp.max(largest) if model is shared else largest)
