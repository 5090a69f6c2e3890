"""The kernels of experts in FP8, cast once: in a cache that a state carries and the optimizer writes, for several
microbatches, and by `cast_weights`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
from moe.test_moe import RECIPES, TOKENS, gpt, train, variables_of
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import experts_name
from jax_fp8.ops.grouped_linear import of_each_expert
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.optim.updates import InPlace
from jax_fp8.state.weight_cache import cast_requests


@functools.cache
def casting(name):
    """A program that casts the weights of a GPT with this recipe, given its variables."""
    model = gpt(RECIPES[name])
    forward = lambda variables: model.apply(variables, TOKENS[:, :-1])  # noqa: E731
    return jax.jit(lambda variables: fp8.cast_weights(variables, model.recipe, forward=forward))


@functools.cache
def with_cache(name) -> dict:
    variables = dict(variables_of(name))
    return {**variables, "fp8_cache": casting(name)(variables)}


def stepped(model, variables, microbatches, tx, steps=3) -> fp8.TrainState:
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, model.recipe, microbatches, warm_start=False)
    state = fp8.TrainState.create(variables=variables, tx=tx)
    for _ in range(steps):
        state, _ = step(state, TOKENS)
    return state


def assert_all_same(found, wanted):
    jax.tree.map(assert_same_bits, found, wanted)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("delayed", 1),
        ("current", 2),
        ("block", 2),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("delayed", 2), ("current", 1), ("block", 1))),
    ],
)
def test_a_step_with_a_cache_is_the_step_without(name, microbatches):
    model, tx = gpt(RECIPES[name]), fp8.fused_adamw(1e-3)
    variables = with_cache(name)
    plain = {name: tree for name, tree in variables.items() if name != "fp8_cache"}
    cached, without = (stepped(model, of, microbatches, tx) for of in (variables, plain))
    assert_all_same(cached.params, without.params)
    assert_all_same(cached.fp8, without.fp8)
    fresh = casting(name)(without.variables)
    of_experts = [cache["layer_0"]["mlp"] for cache in (cached.cache, fresh)]
    assert_all_same(*of_experts)


def test_the_layer_reads_the_cache():
    """Another cache, another result: else the test above could not fail."""
    model = gpt(RECIPES["delayed"])
    variables = with_cache("delayed")
    cache = variables["fp8_cache"]
    other = {**variables, "params": jax.tree.map(lambda param: np.flip(param), variables["params"])}
    mlp = casting("delayed")(other)["layer_0"]["mlp"]
    changed = {**variables, "fp8_cache": {**cache, "layer_0": {**cache["layer_0"], "mlp": mlp}}}
    apply = jax.jit(model.apply)
    logits = [np.asarray(apply(of, TOKENS[:, :-1]), np.float32) for of in (variables, changed)]
    assert np.abs(logits[0] - logits[1]).max() > 0.01


@pytest.mark.parametrize(("name", "written"), [("delayed", True), ("block", True), ("current", False)])
def test_the_optimizer_is_asked_for_them(name, written):
    variables = with_cache(name)
    requests = cast_requests(variables["fp8_cache"], variables["params"], variables.get("fp8", {}))
    mlp = ("layer_0", "mlp")
    gate_and_up = ((*mlp, "gate", "kernel"), (*mlp, "up", "kernel"))
    assert ((*mlp, "down", "kernel") in requests or ((*mlp, "down", "kernel"),) in requests) == written
    assert (gate_and_up in requests) == written


@pytest.mark.parametrize("moments", [jnp.float32, fp8.E4M3])
def test_adam_writes_one_matrix_of_all_experts(moments):
    """The kernels, moments and copies of a tree with experts are those of the same numbers as matrices."""
    experts, k, n = 3, 32, 16
    kernel, gradient = np.random.default_rng(0).normal(size=(2, experts, k, n)).astype(np.float32)
    scale = jnp.float32(0.01)
    values = jnp.zeros((experts * k, n), fp8.E4M3)
    cast = Fp8Pair.with_shared_scale(values, values.T, scale, jnp.float32(0))
    tx = fp8.fused_adamw(1e-2, mu_dtype=moments, nu_dtype=moments)
    request = InPlace({("kernel",): (cast, scale)})
    found = []
    for shape in ((experts, k, n), (experts * k, n)):
        params, grads = {"kernel": kernel.reshape(shape)}, {"kernel": gradient.reshape(shape)}
        new, state = tx.update(grads, tx.init(params), params, in_place=request)
        found.append((new["kernel"], state))
        assert new["kernel"].value.shape == shape
    (of_experts, state), (of_matrix, wanted) = found
    assert_same_bits(of_experts.value.reshape(-1, n), of_matrix.value)
    assert_all_same(of_experts.cast, of_matrix.cast)
    assert float(of_experts.cast.amax) == float(jnp.max(jnp.abs(of_matrix.value)))
    flat = [leaf.reshape(-1) for leaf in jax.tree.leaves(state)], [leaf.reshape(-1) for leaf in jax.tree.leaves(wanted)]
    assert_all_same(*flat)


@pytest.mark.parametrize("name", ["current", "block"])
def test_the_matrices_of_each_expert(name):
    params = {"mlp": {"down": {"kernel": np.random.default_rng(0).normal(size=(4, 256, 128)).astype(np.float32)}}}
    gemm = ("mlp", experts_name(("down",)))

    @jax.jit
    def made(params):
        cache = cast_gemms(params, {}, {gemm: RECIPES[name]})
        matrix = cache["mlp"]["+down"]["kernel"]
        return matrix, of_each_expert(matrix, 4)

    matrix, each = jax.device_get(made(params))
    for expert in range(4):
        rows = slice(256 * expert, 256 * (expert + 1))
        assert_same_bits(each.rowwise.values[expert], matrix.rowwise.values[rows])
        assert_same_bits(each.columnwise.values[expert], matrix.columnwise.values[:, rows])
        if name == "block":
            assert_same_bits(each.columnwise.scale[expert], matrix.columnwise.scale[:, 2 * expert : 2 * expert + 2])


class Stacked(nn.Module):
    """Two layers of experts by `nn.scan`, each with a weight of its own in the cache."""

    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return fp8.LayerNormMoE(128, 4, recipe=RECIPES["delayed"], residual=True, name="moe")(x), None

        stacked = dict.fromkeys(("params", "fp8", "fp8_cache", "losses"), 0)
        scan = nn.scan(Body, variable_axes=stacked, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


def test_stacked_layers_find_their_experts_in_a_cache():
    model, tx, recipe = Stacked(), fp8.fused_adamw(1e-2), RECIPES["delayed"]
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(jnp.bfloat16)
    start = jax.jit(model.init)(jax.random.key(1), x)

    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32) - 1))

    found = []
    for cached, options in ((False, {"cache_weights": False}), (False, {}), (True, {})):
        variables = dict(start)
        if cached:
            variables["fp8_cache"] = jax.jit(functools.partial(fp8.cast_weights, recipe=recipe))(variables)
            assert variables["fp8_cache"]["layers"]["moe"]["+down"]["kernel"].rowwise.shape == (2, 4 * 128, 128)
        step = fp8.make_train_step(loss, tx, recipe, microbatches=2, warm_start=False, **options)
        state = fp8.TrainState.create(variables=variables, tx=tx)
        for _ in range(2):
            state, _ = step(state, x)
        found.append(jax.device_get(state.params))
    assert_all_same(found[1], found[0])
    assert_all_same(found[2], found[0])


def test_a_loss_that_changes_a_kernel_is_refused():
    model = gpt(RECIPES["delayed"])
    loss = fp8.next_token_loss(model)

    def frozen(variables, tokens):
        params = variables["params"]
        mlp = params["layer_0"]["mlp"]
        doubled = {**mlp, "down": {"kernel": 2 * mlp["down"]["kernel"]}}
        return loss({**variables, "params": {**params, "layer_0": {**params["layer_0"], "mlp": doubled}}}, tokens)

    step = fp8.make_train_step(frozen, optax.sgd(0.1), model.recipe, microbatches=2, warm_start=False)
    state = fp8.TrainState.create(variables=variables_of("delayed"), tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="got layer_0/mlp/down/kernel changed by the loss"):
        step(state, TOKENS)


def test_a_cache_of_other_experts_is_refused():
    model, larger = gpt(RECIPES["delayed"]), gpt(RECIPES["delayed"], num_experts=8)
    of_larger = jax.eval_shape(larger.init, jax.random.key(1), TOKENS[:, :-1])
    cache = jax.eval_shape(functools.partial(fp8.cast_weights, recipe=larger.recipe), of_larger)
    with pytest.raises(ValueError, match=r"the weight cache must hold .* of shape"):
        jax.eval_shape(model.apply, {**variables_of("delayed"), "fp8_cache": cache}, TOKENS[:, :-1])


def test_training_goes_on_with_a_cache_over_data():
    model = gpt(RECIPES["delayed"])
    _, one = train(model, microbatches=2, variables=variables_of("delayed"))
    _, found = train(model, microbatches=2, parallel=make_mesh(data=2))
    assert np.max(np.abs(np.subtract(one, found))) < 2e-3
