"""A GPT with experts: it learns, on one device and over data, with microbatches, and writes what it has learned."""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits, relative_error
from transformations.test_lowering import custom_calls

import jax_fp8 as fp8
from jax_fp8.kernels.grouped_gemm import GRADIENT_TARGET, TARGET
from jax_fp8.models.huggingface.config_json import family_of
from jax_fp8.ops.grouped_linear import check_kernels
from jax_fp8.ops.parameters import LinearParameters

DELAYED = fp8.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "none": None}
SLOW = pytest.mark.slow
BATCH, SEQ, VOCAB = 8, 16, 64
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)


def gpt(recipe, layers=1, remat="none", **config) -> fp8.GPT:
    sizes = {"num_layers": layers, "vocab_size": VOCAB, "mlp_hidden_size": 128} | config
    return fp8.GPT(fp8.GPTConfig.preset("tiny-moe", **sizes), recipe=recipe, remat=remat)


@functools.cache
def variables_of(name, layers=1):
    """The variables that models with this recipe begin with: of all but delayed scaling they are params only."""
    if name not in ("delayed", "none"):
        return variables_of("none", layers)
    return jax.jit(gpt(RECIPES[name], layers).init)(jax.random.key(1), TOKENS[:, :-1])


def train(model, steps=3, tx=None, context=None, place=None, tokens=TOKENS, variables=None, **options):
    """The state after some steps, and the losses."""
    options, tx = {"warm_start": False} | options, tx or optax.sgd(0.1)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, model.recipe, **options)
    with context or nullcontext():
        if variables is None:
            state = step.init_state(model.init, jax.random.key(1), tokens[:, :-1])
        else:
            state = fp8.TrainState.create(variables=jax.tree.map(jnp.asarray, variables), tx=tx)
            state = step.place(state, tokens) if "parallel" in options else state
        state, tokens = place(state, tokens) if place else (state, tokens)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, tokens)
            losses.append(float(metrics["loss"]))
    return jax.tree.map(np.asarray, state), losses


def largest_error(params, wanted) -> float:
    return max(jax.tree.leaves(jax.tree.map(relative_error, params, wanted)))


@functools.cache
def learned(name):
    """The model, the state after thirty steps, and the losses."""
    model = gpt(RECIPES[name], max_seq_len=32)
    return model, *train(model, 30, fp8.fused_adamw(2e-3), variables=variables_of(name))


@pytest.mark.parametrize("name", RECIPES)
def test_thirty_steps_learn(name):
    _, state, losses = learned(name)
    assert losses[-1] < 0.35 * losses[0], losses[::10]
    if name == "delayed":
        histories = [leaf for path, leaf in jax.tree.leaves_with_path(state.fp8) if path[-1].key == "amax_history"]
        assert len(histories) == 4 and all((history[..., 1:] > 0).all() for history in histories)


@functools.cache
def with_gradients(remat="none"):
    """A loss, and the program that differentiates it."""
    loss = fp8.next_token_loss(gpt(DELAYED, remat=remat, router_z_loss=1e-3))
    return loss, jax.jit(fp8.value_and_grad(loss))


def test_microbatches_add_up():
    """The mean of their gradients; amaxes are the maximum. Two halves of one batch that are alike are the batch."""
    variables, halves = variables_of("delayed"), [TOKENS[::2], TOKENS[1::2]]
    loss, differentiated = with_gradients()
    found = [differentiated(variables, half) for half in halves]
    step = fp8.make_train_step(loss, optax.sgd(1.0), DELAYED, microbatches=2, warm_start=False)
    state = fp8.TrainState.create(variables=variables, tx=optax.sgd(1.0))
    after, metrics = step(state, TOKENS)
    assert abs(float(metrics["loss"]) - np.mean([float(loss) for loss, _, _ in found])) < 1e-5
    mean = jax.tree.map(lambda p, *g: np.asarray(p) - sum(np.asarray(x) for x in g) / 2, variables["params"],
                        *(grads for _, grads, _ in found))  # fmt: skip
    moved = jax.tree.map(lambda p, q: np.asarray(p) - np.asarray(q), variables["params"], after.params)
    wanted = jax.tree.map(lambda p, q: np.asarray(p) - q, variables["params"], mean)
    assert largest_error(moved, wanted) < 1e-4
    newest = after.fp8["layer_0"]["mlp"]["+down"]["amax_history"][:, -1]
    staged = [state["layer_0"]["mlp"]["+down"]["amax_history"][:, 0] for _, _, state in found]
    assert_same_bits(newest, np.maximum(*map(np.asarray, staged)))


# Over devices, how params move in three steps: by `parallel=`, where each device sorts its own tokens; on an Explicit
# mesh; and on an Auto mesh, where all tokens are sorted together. Operations are fused otherwise on shards, and where a
# fusion ends the compiler rounds to bfloat16, so now and then another FP8 value follows.
MESHES = [("mesh", "data"), ("mesh", "fsdp"), ("explicit", "data"), ("auto", "data")]


@functools.cache
def on_one_device(name):
    """The tokens, the variables to start with, and the state and losses of three steps."""
    given = np.tile(TOKENS, (1, 4 if name == "block" else 1))[:, : 64 + 1]  # whole tiles
    variables = jax.tree.map(np.asarray, variables_of(name))
    return given, variables, *train(gpt(RECIPES[name]), tokens=given, variables=variables)


@pytest.mark.parametrize(
    ("name", "kind", "axis"),
    [
        *(("delayed", *of) for of in MESHES),
        *(pytest.param("block", *of, marks=SLOW if of != MESHES[0] else ()) for of in MESHES),
    ],
)
@pytest.mark.filterwarnings("ignore:each device must have whole tiles of a kernel")
def test_over_data_as_on_one_device(name, kind, axis):
    model = gpt(RECIPES[name])
    given, start, one, losses = on_one_device(name)
    if kind == "mesh":
        # Or made on the mesh, in shards: the same but for a last bit, which by tile can send a token elsewhere.
        begin = {} if (name, axis) == ("delayed", "fsdp") else {"variables": start}
        found, losses_found = train(model, tokens=given, parallel=make_mesh(**{axis: 4}), **begin)
    else:
        axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
        mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])

        def place(state, tokens):
            split = jax.device_put(tokens, NamedSharding(mesh, P("data", None)))
            return jax.device_put(state, NamedSharding(mesh, P())), split

        context = jax.set_mesh(mesh) if kind == "explicit" else None
        found, losses_found = train(model, tokens=given, place=place, context=context, variables=start)
    assert np.max(np.abs(np.subtract(losses, losses_found))) < 2e-3, (losses, losses_found)
    moved, wanted = (jax.tree.map(np.subtract, of.params, start["params"]) for of in (found, one))
    bound = 0.1 if kind == "explicit" else 0.02
    assert largest_error(moved, wanted) < bound, jax.tree.map(relative_error, moved, wanted)


def test_a_router_of_one_device_alone_would_be_noticed():
    """The fractions of the balance loss are those of all devices: else the loss were another."""
    model = gpt(None, router_aux_loss=10.0)
    loss = jax.jit(fp8.next_token_loss(model))
    variables = variables_of("none")
    whole = float(loss(variables, TOKENS))
    parts = np.mean([float(loss(variables, np.tile(TOKENS[2 * i : 2 * i + 2], (4, 1)))) for i in range(4)])
    _, losses = train(model, steps=1, parallel=make_mesh(data=4), variables=variables)
    assert abs(losses[0] - whole) < 1e-3 < abs(parts - whole)


def test_the_loss_has_what_routers_add():
    model, full = (gpt(DELAYED, layers=2, router_aux_loss=0.5, remat=remat) for remat in ("none", "full"))
    losses = [fp8.next_token_loss(of) for of in (model, gpt(DELAYED, layers=2, router_aux_loss=0.0), full)]

    @jax.jit
    def found(variables):
        _, left = model.apply(variables, TOKENS[:, :-1], mutable=["losses"])
        return [loss(variables, TOKENS) for loss in losses], model.apply(variables, TOKENS[:, :-1], TOKENS[:, 1:]), left

    (with_router, without, of_full), of_tokens, left = jax.tree.map(float, found(variables_of("delayed", 2)))
    sown = jax.tree.leaves(left)
    assert len(sown) == 2 and all(value > 0.4 for value in sown)
    assert abs(with_router - without - sum(sown)) < 1e-4 and abs(without - of_tokens) < 1e-6
    assert abs(of_full - with_router) < 1e-6


@pytest.mark.parametrize("remat", ["norms", "full"])
def test_remat_gives_the_same_gradients(remat):
    results = [with_gradients(of)[1](variables_of("delayed"), TOKENS[::2]) for of in ("none", remat)]
    (_, wanted, state), (_, grads, state_again) = results
    assert largest_error(grads, wanted) < 0.03
    staged = [tree["layer_0"]["mlp"]["+gate+up"]["amax_history"][:2, 0] for tree in (state, state_again)]
    assert_same_bits(*staged)


def assert_writes_what_it_would_read(model, state, least):
    prompt = TOKENS[:4, :6]
    written = np.asarray(fp8.generate(model, state.variables, prompt, max_new_tokens=6))
    text = np.concatenate([prompt, written], axis=1)
    likely = np.asarray(jax.jit(model.apply)(state.variables, text[:, :-1]), np.float32)[:, 5:].argmax(-1)
    assert np.mean(written == likely) > least
    assert np.mean(written == np.roll(likely, 1, axis=0)) < 0.5


@pytest.mark.parametrize("name", ["current", "none"])
def test_it_writes_what_it_would_read(name):
    """Token by token with a cache, the most likely one after what it has written, as one pass over the text has it."""
    model, state, _ = learned(name)
    assert_writes_what_it_would_read(model, state, least=0.7 if name == "current" else 0.9)


def shapes(name):
    """A loss, and the shapes of what it takes."""
    model = gpt(RECIPES[name])
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32))
    return fp8.next_token_loss(model), variables, jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_what_it_asks_of_cuda(name, with_kernels):
    """Three grouped GEMMs for up, of which wgrad is one for each of gate and up, and three for down; no scatter."""
    loss, variables, tokens = shapes(name)
    calls = custom_calls(fp8.value_and_grad(loss), variables, tokens)
    assert calls[TARGET] == 4 and calls[GRADIENT_TARGET] == 3
    gemms = fp8.explain(fp8.value_and_grad(loss), variables, tokens)
    grouped = [gemm for gemm in gemms if gemm.target in (TARGET, GRADIENT_TARGET)]
    assert len(grouped) == 7 and all(gemm.is_fp8 for gemm in grouped)
    assert all(gemm.is_fp8 or gemm.by_design for gemm in gemms)
    assert {gemm.layer.split("/")[-2:][0] for gemm in grouped} == {"gate+up", "down"}
    rows = 2 * BATCH * SEQ + 127 * 4
    assert {gemm.m for gemm in grouped if gemm.target == TARGET} == {rows // 128 * 128}
    assert "each group of rows with the kernel of its expert" in str(gemms)
    assert "every expert" not in str(gemms)
    assert not custom_calls(fp8.value_and_grad(loss), variables, tokens, platform="cpu")


def test_without_a_recipe_xla_multiplies_all_rows(with_kernels):
    loss, variables, tokens = shapes("none")
    plain = fp8.explain(jax.grad(loss), variables, tokens)
    ragged = [gemm for gemm in plain if "XLA multiplies all rows by every expert" in gemm.reason]
    assert len(ragged) == 2 * 3 and not any(gemm.is_fp8 for gemm in plain)


def test_on_an_explicit_mesh_a_device_multiplies_its_own_rows(with_kernels):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    layer = fp8.LayerNormMoE(128, 4, recipe=fp8.CurrentScaling())
    x = np.ones((512, 128), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
        lowered = jax.jit(layer.apply).trace(variables, x).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if f"custom_call @{TARGET}(" in line]
    assert calls  # one function for both products, whose shapes are alike
    for call in calls:  # 256 choices of 128 tokens, and room for 4 experts
        assert "tensor<640x128xf8E4M3FN>" in call and "tensor<5xi32>" in call


def test_refusals():
    tokens, tx = TOKENS, optax.sgd(0.1)
    model = gpt(DELAYED, layers=2)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, DELAYED, microbatches=2, parallel=make_mesh(pipe=2))
    with pytest.raises(ValueError, match=r"pipelines and .* without the losses of routers, .* num_experts=4"):
        step(step.init_state(model.init, jax.random.key(0), tokens[:, :-1]), tokens)
    model = gpt(DELAYED, layers=2, remat="offload:1")
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])
    with pytest.raises(ValueError, match="without the losses of routers"):
        jax.make_jaxpr(fp8.value_and_grad(fp8.next_token_loss(model)))(variables, tokens)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="every device must have all experts, got a kernel"):
        check_kernels(LinearParameters(jax.device_put(np.ones((4, 128, 16)), NamedSharding(mesh, P("data"))), None))
    with pytest.raises(ValueError, match=r"a model for Hugging Face must be like .* normalize_router_weights=True"):
        family_of(fp8.GPTConfig.preset("mixtral-8x7b", normalize_router_weights=False))
    for changes, sentence in (
        ({"experts_per_token": 9}, "experts_per_token must be at most num_experts, got 9 of 8"),
        ({"num_experts": -1}, "num_experts must be an integer of at least 0, got -1"),
        ({"router_z_loss": -0.1}, "router_z_loss must be a finite number that is not negative"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dataclasses.replace(fp8.GPTConfig.preset("mixtral-8x7b"), **changes)


def test_mixtral_has_as_many_parameters_as_its_paper_says():
    """47 billion, of which a token uses 13 (https://arxiv.org/abs/2401.04088, section 2.1)."""
    model = fp8.GPT(fp8.GPTConfig.preset("mixtral-8x7b"), recipe=None)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]
    sizes = {path: leaf.size for path, leaf in jax.tree.leaves_with_path(params)}
    of_experts = sum(size for path, size in sizes.items() if any(key.key in ("gate", "up", "down") for key in path))
    total = sum(sizes.values())
    assert round(total / 1e9, 1) == 46.7 and round((total - of_experts * 6 / 8) / 1e9, 1) == 12.9
