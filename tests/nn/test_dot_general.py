"""FP8 in Flax's own layers: the same numbers as in the layers of jax_fp8, wherever Flax passes `dot_general_cls` on."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax.training import train_state

import jax_fp8 as fp8
from jax_fp8.core import fp8_gemm
from jax_fp8.inspect.explain import explain
from jax_fp8.ops import carried_state as carried_state_module

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": RECIPE, "current": fp8.CurrentScaling()}
X = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
SEQUENCES = jax.random.normal(jax.random.key(1), (4, 16, 64), jnp.bfloat16)
WIDTHS = {"in": 64, "out": 32}


def product(recipe=RECIPE, **fields):
    return functools.partial(fp8.DotGeneral, recipe=recipe, **fields)


def theirs(recipe=RECIPE, **fields):
    return functools.partial(nn.Dense, dot_general_cls=product(recipe), dtype=jnp.bfloat16, **fields)


def ours(recipe=RECIPE, **fields):
    return functools.partial(fp8.Dense, recipe=recipe, **fields)


class MLP(nn.Module):
    """Two layers of a class, plain, under `nn.remat`, or scanned over."""

    dense: functools.partial
    remat: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        layers = [
            (nn.remat(self.dense.func) if self.remat else self.dense.func)(n, **self.dense.keywords, name=name)
            for name, n in WIDTHS.items()
        ]
        return layers[1](nn.gelu(layers[0](x))), None


class Scanned(nn.Module):
    dense: functools.partial

    @nn.compact
    def __call__(self, x, _=None):
        axes: dict = {"params": 0, "fp8": 0, "fp8_cache": 0}
        return nn.scan(MLP, variable_axes=axes, split_rngs={"params": True}, length=3)(self.dense)(x, None)


def loss_of(model):
    def loss(variables, x):
        y, _ = model.apply(variables, x)
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    return loss


def trained(model, variables, recipe, **options):
    """Losses and the last state of four steps."""
    tx = fp8.fused_adamw(1e-2)
    state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=tx)
    step, losses = fp8.make_train_step(loss_of(model), tx, recipe, **options), []
    for _ in range(4):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, {"params": state.params, "fp8": state.fp8}


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_steps_of_nn_dense_are_those_of_our_dense_bit_for_bit(recipe, microbatches):
    """With the warm start, the weight cache and sums by GEMMs, which find kernels and state by the same paths."""
    models = MLP(theirs(recipe, use_bias=False)), MLP(ours(recipe, use_bias=False))
    variables = [model.init(jax.random.key(2), X) for model in models]
    assert_same(*variables)
    found, expected = (trained(model, variables[0], recipe, microbatches=microbatches) for model in models)
    assert found[0] == expected[0] and found[0][-1] < found[0][0]
    assert_same(found[1], expected[1])
    other = MLP(theirs(None, use_bias=False))  # a control: bfloat16 has other losses
    assert trained(other, {"params": variables[0]["params"]}, None, microbatches=microbatches)[0] != found[0]


def test_a_bias_is_added_after_the_rounding():
    """Flax adds it to the result in bfloat16, our GEMM before the one rounding: within a bfloat16 ulp, twice."""
    variables = MLP(ours(bias_init=nn.initializers.normal(1.0))).init(jax.random.key(2), X)
    (found, _), (expected, _) = (MLP(dense()).apply(variables, X) for dense in (theirs, ours))
    assert np.any(found != expected)
    reference.assert_close(found, expected, "bfloat16")


@pytest.mark.parametrize("model", [functools.partial(MLP, remat=True), Scanned], ids=["remat", "scan"])
def test_state_follows_under_remat_and_scan(model):
    variables = model(ours(use_bias=False)).init(jax.random.key(2), X)
    results = [
        jax.jit(fp8.value_and_grad(loss_of(model(dense(use_bias=False)))))(variables, X) for dense in (theirs, ours)
    ]
    assert_same(*results)
    assert all(np.all(np.asarray(leaf)[..., 0] > 0) for leaf in histories(results[0][2]))
    assert len(trained(model(theirs()), model(theirs()).init(jax.random.key(2), X), RECIPE, microbatches=2)[0]) == 4


def histories(state):
    return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if path[-1].key == "amax_history"]


def test_state_follows_under_vmap():
    """A batch that shares the state stages its maximum: that of the batch as rows."""
    model = MLP(theirs(use_bias=False))
    variables = model.init(jax.random.key(2), X)
    halves = X.reshape(2, 32, 32)

    def vmapped(variables, x):
        return jnp.mean(jax.vmap(lambda rows: loss_of(model)(variables, rows))(x))

    _, _, found = jax.jit(fp8.value_and_grad(vmapped))(variables, halves)
    _, _, expected = jax.jit(fp8.value_and_grad(loss_of(model)))(variables, X)
    assert_same(found, expected)


def attention(cls):
    return nn.MultiHeadDotProductAttention(
        4, dtype=jnp.bfloat16, qkv_dot_general_cls=cls, out_dot_general_cls=cls, use_bias=False
    )


def test_projections_of_flaxs_attention():
    """Kernels of three dims: the state has names of its own, and every way to train goes without the extras."""
    model, plain = attention(product()), attention(None)
    variables = model.init(jax.random.key(2), SEQUENCES)
    assert sorted(variables["fp8"]) == ["key", "out", "query", "value"]
    assert sorted(variables["fp8"]["query"]["DotGeneral_0"]["~product"]) == ["amax_history", "scale"]

    def loss(variables, x, model=model):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    state = jax.jit(fp8.warm_start(loss, RECIPE))(variables, SEQUENCES)
    value, grads, staged = jax.jit(fp8.value_and_grad(loss))({**variables, "fp8": state}, SEQUENCES)
    expected, expected_grads = jax.value_and_grad(lambda params: loss({"params": params}, SEQUENCES, plain))(
        variables["params"]
    )
    assert abs(value / expected - 1) < 0.05
    for name, found in grads.items():
        reference.assert_close(found["kernel"], expected_grads[name]["kernel"], "block_gradient")
    amaxes = staged["query"]["DotGeneral_0"]["~product"]["amax_history"][:2, 0]
    kernel = variables["params"]["query"]["kernel"]
    np.testing.assert_array_equal(amaxes, [reference.amax(SEQUENCES), reference.amax(kernel)])
    gemms = [gemm for gemm in explain(model.apply, variables, SEQUENCES) if gemm.is_fp8]
    assert sum(gemm.count for gemm in gemms) == 4
    assert fp8.cast_weights(variables, RECIPE) == {}

    tx, losses = fp8.fused_adamw(1e-2), {}
    for microbatches in (1, 2):
        step = fp8.make_train_step(loss, tx, RECIPE, microbatches, warm_start=microbatches > 1)
        train = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=tx)
        for _ in range(3):
            train, metrics = step(train, SEQUENCES)
        losses[microbatches] = float(metrics["loss"])
    assert losses[2] < expected and abs(losses[1] / losses[2] - 1) < 0.01


@pytest.mark.parametrize("features, axis", [(64, -1), ((4, 16), -1), (32, (-2, -1)), (32, (1, -1)), ((2, 16), (-1, 1))])
def test_dims_of_any_kind_become_one_product(features, axis):
    x = jax.random.normal(jax.random.key(3), (4, 2, 3, 32), jnp.bfloat16)
    general = functools.partial(nn.DenseGeneral, features, axis, use_bias=False, dtype=jnp.bfloat16)
    model = general(dot_general_cls=product())
    variables = model.init(jax.random.key(2), x)
    y, expected = model.apply(variables, x), general().apply({"params": variables["params"]}, x)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    reference.assert_close(y, expected, "linear")


def test_a_transposed_kernel():
    x, kernel = X, jax.random.normal(jax.random.key(4), (48, 32), jnp.bfloat16)
    model = fp8.DotGeneral(recipe=fp8.CurrentScaling())
    y = model.apply({}, x, kernel, (((1,), (1,)), ((), ())))
    np.testing.assert_array_equal(y, model.apply({}, x, kernel.T, (((1,), (0,)), ((), ()))))
    reference.assert_close(y, x @ kernel.T, "linear")


def test_a_layer_that_changes_its_kernel_is_not_taken_for_flaxs():
    """It masks what it hands over: no kernel by a path, so nothing reads the one without the mask."""

    class Masked(nn.Dense):
        @nn.compact
        def __call__(self, inputs):
            kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features))
            masked = kernel.at[:, ::2].set(0).astype(inputs.dtype)
            return self.dot_general_cls()(inputs, masked, (((inputs.ndim - 1,), (0,)), ((), ())))

    model = Masked(32, dot_general_cls=product())
    variables = model.init(jax.random.key(2), X)
    assert sorted(variables["fp8"]) == ["DotGeneral_0"]
    assert not np.any(model.apply(variables, X)[:, ::2])
    _, grads, _ = fp8.value_and_grad(lambda v, x: jnp.sum(model.apply(v, x).astype(jnp.float32)))(variables, X)
    assert not np.any(grads["kernel"][:, ::2]) and np.any(grads["kernel"])
    plain = nn.Dense(32, dot_general_cls=product(), use_bias=False)  # a control: here it is
    assert sorted(plain.init(jax.random.key(2), X)["fp8"]) == ["amax_history", "scale"]


class Named(nn.Module):
    layer: Callable

    @nn.compact
    def __call__(self, x):
        return self.layer(name="head")(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (theirs(features=10), r"head: FP8 needs out features divisible by 16, got 10; pad them"),
        (
            theirs(precision="highest", features=32),
            r"head: precision must be None where the product is in FP8, got 'highest'",
        ),
        (
            functools.partial(nn.DenseGeneral, (2, 5), dot_general_cls=product()),
            r"head: FP8 needs out features divisible by 16, got 10",
        ),
        (
            functools.partial(nn.DenseGeneral, 16, batch_dims=(0,), dot_general_cls=product()),
            r"head: an FP8 product has no batch dims",
        ),
        (functools.partial(nn.Dense, 16, dot_general_cls=product("fp9")), r"recipe must be"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_layer(layer, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(Named(layer).init, jax.random.key(0), SEQUENCES)


def test_no_recipe_is_flaxs_own_product():
    with_none, plain = theirs(None)(32), nn.Dense(32, dtype=jnp.bfloat16)
    variables = with_none.init(jax.random.key(2), X)
    assert_same(variables, plain.init(jax.random.key(2), X))
    np.testing.assert_array_equal(with_none.apply(variables, X), plain.apply(variables, X))


def test_plain_gradients_warn_and_are_right(recwarn):
    fp8_gemm._warn_unrecorded.cache_clear()
    model = MLP(theirs(use_bias=False))
    variables = model.init(jax.random.key(2), X)
    grads = jax.grad(lambda params: 2.0**-30 * loss_of(model)({**variables, "params": params}, X))(variables["params"])
    assert any("differentiated without" in str(warning.message) for warning in recwarn)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


def carried(**fields):
    return functools.partial(
        nn.Dense, dot_general_cls=product(overwrite_with_gradient=True), dtype=jnp.bfloat16, use_bias=False, **fields
    )


class ScannedCarried(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes: dict = {"params": 0, "_overwrite_with_gradient": 0}
        return nn.scan(MLP, variable_axes=axes, split_rngs={"params": True}, length=3)(carried(), True)(x, None)


def losses_of_flaxs_own_step(model, variables, by_state=True, steps=12):
    """With Flax's TrainState, which puts the gradient of the state in its place; and the last variables."""
    keep = variables if by_state else {"params": variables["params"]}
    state = train_state.TrainState.create(apply_fn=model.apply, params=keep, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda kept: loss_of(model)({**variables, **kept}, X))(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
    return losses, state.params


@pytest.mark.parametrize(
    "model", [MLP(carried()), MLP(carried(), remat=True), ScannedCarried()], ids=["", "remat", "scan"]
)
def test_flaxs_own_train_state_carries_the_state(model):
    variables = model.init(jax.random.key(2), X)
    assert sorted(variables) == ["_overwrite_with_gradient", "params"]
    losses, last = losses_of_flaxs_own_step(model, variables)
    assert losses[-1] < 0.8 * losses[0]
    found = histories(last["_overwrite_with_gradient"])
    assert found and all(np.all((np.asarray(leaf) > 0) == (np.arange(4) > 0)) for leaf in found)


def test_a_step_that_keeps_the_state_out_of_its_gradients_scales_by_own_amaxes():
    model = MLP(carried(param_dtype=jnp.bfloat16))  # so that both read the same kernel
    variables = model.init(jax.random.key(2), X)
    carried_state_module._warn_not_carried.cache_clear()
    with pytest.warns(UserWarning, match="not by its state"):
        losses, _ = losses_of_flaxs_own_step(model, variables, by_state=False)
    current = MLP(theirs(fp8.CurrentScaling(), use_bias=False, param_dtype=jnp.bfloat16))
    expected, _ = losses_of_flaxs_own_step(current, {"params": variables["params"]})
    assert losses == expected


def test_a_carried_state_is_refused_by_the_name_of_the_layer():
    def other(**fields):
        return MLP(functools.partial(nn.Dense, use_bias=False, dot_general_cls=product(**fields)))

    variables = MLP(carried()).init(jax.random.key(2), X)
    with pytest.raises(ValueError, match=r"in: the state of a product with DelayedScaling must have amax_history"):
        other(recipe=fp8.DelayedScaling(), overwrite_with_gradient=True).apply(variables, X)
    with pytest.raises(ValueError, match="overwrite_with_gradient must be True or False"):
        other(overwrite_with_gradient="yes").init(jax.random.key(2), X)
    with pytest.raises(ValueError, match="recompute must be False with overwrite_with_gradient"):
        other(overwrite_with_gradient=True, recompute=True).init(jax.random.key(2), X)
