"""Training on meshes, on eight CPU devices: Explicit meshes (the default of `jax.make_mesh`), data parallel and with
params split over the same axis (fsdp), with and without `jax.set_mesh`; and a data-parallel step in a `shard_map` with
its defaults.

With FP8 layers what is exact stays exact: with delayed scaling every amax and the gradient of every kernel have the
bits of one device, since products of FP8 values are exact in float32 and their sums, for these sizes, too. Sums of
float32 over tokens (the loss, gradients of embedding, norms and biases) are added up by device first, and differ by
their rounding. In plain bfloat16 the compiler rounds where its fusions end, which is elsewhere on shards.
"""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import with_scales
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits, relative_error

import jax_fp8 as fp8

DEVICES, BATCH, SEQ = 4, 8, 16
SUMS_IN_ANOTHER_ORDER = 1e-5
AFTER_STEPS = 3e-3  # a param that differs in its last bit is now and then another FP8 value
ROUNDED_ELSEWHERE = 0.03  # some roundings to 8 bits


def gpt(recipe, llama=False) -> fp8.GPT:
    like_llama = {
        "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2, "tie_embeddings": False,
    }  # fmt: skip
    options = like_llama if llama else {}
    config = fp8.GPTConfig(
        vocab_size=64, num_layers=1, num_heads=4, hidden_size=64, max_seq_len=SEQ, use_bias=False, **options
    )
    return fp8.GPT(config, recipe=recipe)


def tokens(batch=BATCH, seq=SEQ) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (batch, seq + 1)).astype(np.int32)


def make_mesh(axis_type=AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:DEVICES])


def fsdp(x) -> P:
    """The first dim that is large enough, over the axis of the batch: rows of kernels, norms, vocabulary."""
    return P("data") if x.ndim and x.shape[0] >= 16 and x.shape[0] % DEVICES == 0 else P()


def place(mesh, tree, spec_of=lambda x: P()):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x))), tree)


def place_variables(mesh, variables, how):
    others = {name: place(mesh, tree) for name, tree in variables.items() if name != "params"}
    return {"params": place(mesh, variables["params"], fsdp if how == "fsdp" else lambda x: P()), **others}


def train(loss_fn, recipe, variables, batch, microbatches=2):
    """The state after three steps, and their losses."""
    tx = fp8.fused_adamw(1e-2, eps=1e-2)  # so large that noise is not made a step of full size
    state = first_state(recipe, tx)(variables)
    step, losses = fp8.make_train_step(loss_fn, tx, recipe, microbatches, warm_start=False), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, jnp.stack(losses)


def first_state(recipe, tx):
    """Of variables, of which it has a copy: the step donates its state."""

    def make(variables):
        cache = {"fp8_cache": fp8.cast_weights(variables, recipe)} if recipe.has_state else {}
        return fp8.TrainState.create(variables=jax.tree.map(jnp.copy, with_scales(variables)) | cache, tx=tx)

    return jax.jit(make)


@functools.cache
def variables_of(model):
    return jax.jit(model.init)(jax.random.key(0), tokens()[:, :-1])


@functools.cache
def on_one_device(recipe, llama=False):
    """The model, its variables, and loss, gradients and FP8 state of one pass."""
    model = gpt(recipe, llama)
    one_pass = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)))
    return model, variables_of(model), one_pass(variables_of(model), tokens())


@functools.cache
def trained_on_one_device(recipe, llama):
    model = gpt(recipe, llama)
    return train(fp8.next_token_loss(model), recipe, variables_of(model), tokens())


def kernels(tree) -> dict:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if "kernel" in jax.tree_util.keystr(path)
    }


def assert_close(actual, expected, tolerance):
    def check(path, got, wanted):
        assert relative_error(got, wanted) <= tolerance, (jax.tree_util.keystr(path), relative_error(got, wanted))

    jax.tree_util.tree_map_with_path(check, actual, expected)


CASES = {
    "data, in the context of its mesh": ("data", fp8.DelayedScaling(), True, True),
    "fsdp": ("fsdp", fp8.DelayedScaling(), True, False),
    "fsdp, current scaling": ("fsdp", fp8.CurrentScaling(), False, False),
}


@pytest.mark.parametrize(
    "case", [case if case != "fsdp" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_training_on_an_explicit_mesh_is_training_on_one_device(case):
    how, recipe, llama, set_mesh = CASES[case]
    model, variables, expected = on_one_device(recipe, llama)
    mesh = make_mesh()
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        placed = place_variables(mesh, variables, how)
        batch = jax.device_put(tokens(), NamedSharding(mesh, P("data")))
        value, grads, fp8_state = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)))(placed, batch)
        state, losses = train(fp8.next_token_loss(model), recipe, placed, batch)
    jax.tree.map(assert_same_bits, fp8_state, expected[2])
    if recipe.has_state:
        jax.tree.map(assert_same_bits, kernels(grads), kernels(expected[1]))
    assert_close((value, grads), expected[:2], SUMS_IN_ANOTHER_ORDER)
    of_one, of_one_losses = trained_on_one_device(recipe, llama)
    assert_close((losses, state.params), (of_one_losses, of_one.params), AFTER_STEPS)
    for tree in (grads, state.params, state.opt_state.mu):  # nothing was gathered
        for leaf, param in zip(jax.tree.leaves(tree), jax.tree.leaves(placed["params"]), strict=True):
            assert leaf.sharding.is_equivalent_to(param.sharding, param.ndim)


def test_plain_bfloat16_on_an_explicit_mesh():
    model, mesh = gpt(None), make_mesh()
    record = jax.jit(jax.value_and_grad(fp8.next_token_loss(model)))
    variables = variables_of(model)
    batch = jax.device_put(tokens(), NamedSharding(mesh, P("data")))
    assert_close(
        record(place_variables(mesh, variables, "fsdp"), batch), record(variables, tokens()), ROUNDED_ELSEWHERE
    )


SPLITS = {name: P(None, "tensor") for name in ("query", "key", "value", "gate", "up")}
SPLITS |= {name: P("tensor", None) for name in ("out", "down")}


def by_heads_and_columns(path, leaf) -> P:
    names = [key.key for key in path]
    return SPLITS.get(names[-2], P()) if names[0] == "params" and names[-1] == "kernel" else P()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_tensor_parallel(axis_type):
    """Partial products are added in float32 and rounded then, so activations differ by roundings."""
    model, variables, expected = on_one_device(fp8.DelayedScaling(), True)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2, devices=jax.devices()[:DEVICES])
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, by_heads_and_columns(path, leaf)), variables
    )
    batch = jax.device_put(tokens(), NamedSharding(mesh, P("data")))
    placed = jax.device_put(variables, shardings)
    value, grads, fp8_state = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)))(placed, batch)
    assert_close((value, fp8_state), (expected[0], expected[2]), 1e-2)
    assert_close(grads, expected[1], ROUNDED_ELSEWHERE)


def test_with_fsdp_params_are_split_in_their_types():
    """Negative control: otherwise the test above would be one of data parallelism."""
    model, mesh = gpt(fp8.DelayedScaling()), make_mesh()
    variables = place_variables(mesh, variables_of(model), "fsdp")
    layer = variables["params"]["layer_0"]
    for leaf in (layer["mlp"]["up"]["kernel"], layer["mlp"]["norm"]["scale"], variables["params"]["embedding"]):
        assert jax.typeof(leaf).sharding.spec[0] == "data"
        assert leaf.addressable_shards[0].data.size * DEVICES == leaf.size


def test_another_batch_would_be_noticed():
    """Negative control: amaxes of half of the batch are not those of all of it."""
    (model, variables, (_, _, of_all)), mesh = on_one_device(fp8.DelayedScaling()), make_mesh()
    record = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)))
    half = np.concatenate([tokens()[: BATCH // 2]] * 2)
    of_half = record(place(mesh, variables), jax.device_put(half, NamedSharding(mesh, P("data"))))[2]
    with pytest.raises(AssertionError, match="elements differ"):
        jax.tree.map(assert_same_bits, of_half, of_all)


class Own(nn.Module):
    """A model of one's own: every layer of the library, among layers of Flax."""

    @nn.compact
    def __call__(self, x):
        x = fp8.Dense(64, name="into")(x)
        x = fp8.SelfAttention(4, norm="layernorm", residual=True, name="attention")(x)
        x, residual = fp8.LayerNormDense(64, return_input=True, name="wide")(nn.relu(x))
        return fp8.LayerNormMLP(128, "geglu", residual=True, name="mlp")(fp8.Dense(64, name="out")(x, residual))


def own_loss(variables, x):
    return jnp.mean(jnp.square(Own().apply(variables, x).astype(jnp.float32)))


def test_models_of_ones_own_without_a_mesh_in_context():
    mesh, x = make_mesh(), np.random.default_rng(0).normal(size=(BATCH, SEQ, 32)).astype(np.float32)
    variables = jax.jit(Own().init)(jax.random.key(0), x)
    expected = jax.jit(fp8.value_and_grad(own_loss))(variables, x)
    placed, batch = place_variables(mesh, variables, "fsdp"), jax.device_put(x, NamedSharding(mesh, P("data")))
    value, grads, state = jax.jit(fp8.value_and_grad(own_loss))(placed, batch)
    jax.tree.map(assert_same_bits, state, expected[2])
    assert_close((value, kernels(grads)), (expected[0], kernels(expected[1])), SUMS_IN_ANOTHER_ORDER)


def test_flax_initializes_on_the_mesh():
    """Under `jit` with `out_shardings`: the numbers of init on one device, but for how the compiler rounds a normal."""
    model, mesh = gpt(fp8.DelayedScaling()), make_mesh()
    expected = variables_of(model)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens()[:, :-1])
        shardings = {"params": jax.tree.map(lambda x: NamedSharding(mesh, fsdp(x)), shapes["params"])}
        shardings["fp8"] = jax.tree.map(lambda x: NamedSharding(mesh, P()), shapes["fp8"])
        variables = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0), tokens()[:, :-1])
        assert jax.typeof(variables["params"]["layer_0"]["mlp"]["up"]["kernel"]).sharding.spec[0] == "data"
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-5, 1e-7), variables, expected)


def test_what_cannot_be_split_is_refused_in_one_sentence():
    model, mesh = gpt(fp8.DelayedScaling()), make_mesh()
    loss_fn = fp8.next_token_loss(model)
    variables = place(mesh, variables_of(model))

    def put(batch, *spec):
        return jax.device_put(batch, NamedSharding(mesh, P(*spec)))

    with pytest.raises(ValueError, match=r"multiple of 16 on each of 4 devices, got 8; change the batch or sequence"):
        jax.eval_shape(fp8.value_and_grad(loss_fn), variables, put(tokens(4, 8), "data"))
    tx = optax.sgd(1e-3)
    state = fp8.TrainState.create(variables=variables, tx=tx)
    with pytest.raises(ValueError, match=r"whole sequences of each microbatch, got 2 of them over 4 devices; change"):
        fp8.make_train_step(loss_fn, tx, model.recipe, microbatches=4)(state, put(tokens(), "data"))
    with pytest.raises(ValueError, match=r"only the first may be split on an Explicit mesh.* split the batch and not"):
        jax.eval_shape(model.apply, variables, put(tokens()[:, :-1], None, "data"))


# ---- shard_map with its defaults -------------------------------------------------------------------------------------


def data_parallel(loss_fn, varying_params):
    """A data-parallel step by hand: gradients are summed and amaxes raised over devices."""

    def run(variables, batch):
        if varying_params and hasattr(lax, "pcast"):
            variables = lax.pcast(variables, "data", to="varying")
        elif varying_params:
            variables = jax.tree.map(lambda x: lax.pvary(x, "data"), variables)
        loss, grads, state = fp8.value_and_grad(lambda *given: loss_fn(*given) / DEVICES)(variables, batch)
        grads = lax.psum(grads, "data") if varying_params else grads  # jax has summed those of what does not vary
        return lax.psum(loss, "data"), grads, lax.pmax(state, "data")

    return run


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("varying_params", [False, True])
def test_shard_map_with_its_defaults(axis_type, varying_params):
    (model, variables, expected), mesh = on_one_device(fp8.DelayedScaling()), make_mesh(axis_type)
    step = data_parallel(fp8.next_token_loss(model), varying_params)
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    value, grads, state = mapped(place(mesh, variables), jax.device_put(tokens(), NamedSharding(mesh, P("data"))))
    assert_close((value, grads), expected[:2], SUMS_IN_ANOTHER_ORDER)
    jax.tree.map(assert_same_bits, (kernels(grads), state), (kernels(expected[1]), expected[2]))


def test_amaxes_that_are_left_on_their_devices_are_refused_by_jax():
    """Negative control: without its maximum over devices the state varies, and `shard_map` says so."""
    model, mesh = gpt(fp8.DelayedScaling()), make_mesh(AxisType.Auto)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens()[:, :-1])
    record = fp8.value_and_grad(fp8.next_token_loss(model))
    mapped = jax.shard_map(lambda *given: record(*given)[2], mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(mapped, variables, tokens())
