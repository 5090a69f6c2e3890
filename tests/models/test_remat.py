"""What a user says of the layers of a GPT, which layers it means, and that no bit of a step depends on it."""

import functools

import jax
import numpy as np
import pytest
from hybrid import gpt, make_mesh, tokens
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.checkpoint_names import RESIDUAL_NAMES
from jax_fp8.models.remat import Remat

RECIPE = fp8.DelayedScaling(amax_history_len=2)


@pytest.mark.parametrize(
    ("count", "layers", "offloaded"),
    [(0, 4, []), (1, 4, [0]), (2, 4, [0, 2]), (3, 4, [0, 2, 3]), (4, 4, [0, 1, 2, 3]), (8, 24, [*range(0, 24, 3)])],
)
def test_layers_that_are_offloaded_stand_apart(count, layers, offloaded):
    remat = Remat.parse(f"offload:{count}", layers)
    kinds = [remat.kind_for(index) for index in range(layers)]
    assert [index for index, kind in enumerate(kinds) if kind == "offload"] == offloaded
    assert {*kinds} <= {"offload", "none"} and remat.names == RESIDUAL_NAMES


def test_all_layers_do_the_same_otherwise():
    for kind in ("none", "norms", "full"):
        assert {Remat.parse(kind, 3).kind_for(index) for index in range(3)} == {kind}
    assert Remat.parse("offload:2:mlp_hidden,norm_input", 3).names == ("mlp_hidden", "norm_input")


def test_a_loss_names_the_layers_that_keep_on_the_host():
    for remat, on_host in (("none", ()), ("full", ()), ("offload:1", ("layer_0",)), ("offload:0", ())):
        assert fp8.next_token_loss(gpt(RECIPE).clone(remat=remat)).on_host == on_host


@pytest.mark.parametrize(
    "text", ["offload", "offload:", "offload:5", "offload:-1", "offload:2:all", "offload:2:", "full:2", "some", "", 3]
)
def test_what_means_nothing_is_refused(text):
    message = r"remat must be none, norms, full, offload:N with N of 4 layers, or offload:N:NAMES .* got "
    with pytest.raises(ValueError, match=message):
        Remat.parse(text, 4)


@functools.cache
def first_variables(recipe=RECIPE, **config) -> dict:
    """Of the small GPT, however its layers keep what they do."""
    return jax.tree.map(np.asarray, dict(jax.jit(gpt(recipe, **config).init)(jax.random.key(0), tokens()[:, :-1])))


def state_after(remat, microbatches, recompute=False, num_layers=2, **options):
    """One step of a small GPT."""
    model = gpt(RECIPE, recompute=recompute, num_layers=num_layers).clone(remat=remat)
    tx = fp8.fused_adamw(1e-3)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPE, microbatches, warm_start=False, **options)
    variables = first_variables(num_layers=num_layers)
    state = step.place(fp8.TrainState.create(variables=variables, tx=tx), tokens())
    state, metrics = step(state, tokens())
    return jax.tree.map(np.asarray, (state.params, state.opt_state, state.fp8)), float(metrics["loss"])


@pytest.mark.parametrize(
    ("microbatches", "num_layers", "kinds"), [(1, 1, ["norms", "offload:1:mlp_hidden"]), (2, 2, ["full", "offload:1"])]
)
def test_a_step_does_not_depend_on_it(microbatches, num_layers, kinds):
    expected = state_after("none", microbatches, num_layers=num_layers)
    for remat in kinds:
        jax.tree.map(assert_same_bits, state_after(remat, microbatches, num_layers=num_layers), expected)


@pytest.mark.slow
def test_norms_are_recompute():
    jax.tree.map(assert_same_bits, state_after("none", 1, recompute=True), state_after("norms", 1))


@pytest.mark.parametrize(("axes", "layers"), [({"fsdp": 2}, 2), ({"data": 2, "tensor": 2}, 1)], ids=str)
def test_nor_on_a_mesh(axes, layers):
    """Loss, FP8 state and moments of kernels to the bit. Gradients of biases XLA adds up in another order; that of a
    key's is zero in exact arithmetic.
    """
    mesh = make_mesh(**axes)
    kinds = ("none", f"offload:{layers}")
    expected, actual = (state_after(remat, 2, num_layers=layers, parallel=mesh) for remat in kinds)
    (_, moments, fp8_state), loss = actual
    jax.tree.map(assert_same_bits, (fp8_state, loss), (expected[0][2], expected[1]))
    compared = 0
    for (path, one), other in zip(jax.tree.leaves_with_path(moments), jax.tree.leaves(expected[0][1]), strict=True):
        name = jax.tree_util.keystr(path)
        if "bias" not in name:
            assert_same_bits(one, other)
            compared += one.ndim > 1 and bool(np.any(other))
        elif "key" not in name:
            assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
    assert compared > 8


def test_a_pipeline_keeps_on_the_device():
    with pytest.raises(ValueError, match="must keep what their backward needs on the device, got one that keeps some"):
        state_after("offload:2", 2, parallel=make_mesh(pipe=2))


# --- without FP8 ------------------------------------------------------------------------------------------------------


def plain_gradients(remat, **config):
    """Of a GPT in float32 without FP8: a function of no arguments that computes gradients, products of the program, and
    bytes that the backward keeps.
    """
    model = gpt(None, dtype=np.float32, num_layers=1, **config).clone(remat=remat)
    variables = first_variables(None, num_layers=1, **config)
    loss = functools.partial(fp8.next_token_loss(model), batch=tokens())

    def of_params(params):
        return loss({**variables, "params": params})

    program = str(jax.make_jaxpr(jax.grad(of_params))(variables["params"]))
    products = program.count(" dot_general[") + program.count(" ragged_dot_general[")
    residuals = jax.eval_shape(lambda params: jax.vjp(of_params, params)[1], variables["params"])
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    return lambda: jax.jit(jax.grad(of_params))(variables["params"]), products, kept


@pytest.mark.parametrize("config", [{}, {"num_experts": 4, "experts_per_token": 2}], ids=["dense", "experts"])
def test_without_fp8_norms_and_activations_are_made_again(config):
    """No product is, unless all is."""
    (expected, products, kept), (found, of_norms, kept_of_norms), (_, of_full, kept_of_full) = (
        plain_gradients(remat, **config) for remat in ("none", "norms", "full")
    )
    assert of_norms == products < of_full
    assert kept_of_full < kept_of_norms < 0.7 * kept
    for (path, one), other in zip(jax.tree.leaves_with_path(found()), jax.tree.leaves(expected()), strict=True):
        if "key" in (name := jax.tree_util.keystr(path)) and "bias" in name:
            continue  # zero in exact arithmetic
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) > 0, name


def test_nor_are_collectives_without_fp8():
    """In a step with sequence parallelism; nothing of its arithmetic changes."""
    programs, losses = [], []
    for remat in ("none", "norms", "full"):
        model, tx = gpt(None, dtype=np.float32, num_layers=1).clone(remat=remat), fp8.fused_adamw(1e-3)
        parallel = fp8.Parallelism(make_mesh(tensor=2), sequence_parallel=True)
        step = fp8.make_train_step(fp8.next_token_loss(model), tx, None, parallel=parallel)
        state = fp8.TrainState.create(variables=first_variables(None, num_layers=1), tx=tx)
        state = step.place(state, tokens())
        text = str(step.trace(state, tokens()).jaxpr)
        programs.append([text.count(f" {name}[") for name in ("all_gather", "reduce_scatter", "dot_general")])
        for _ in range(2):
            state, metrics = step(state, tokens())
        losses.append(float(metrics["loss"]))
    none, norms, full = programs
    assert none == norms != full and none[2] > 0 and sum(none[:2]) > 0
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
