"""A tiny model under JAX's strict modes: no dtype or rank is promoted without a word, and no NaN is computed that the
data do not have.

Each mode is a context, so that nothing of it is left to the tests that follow. On the CPU, that is on the references.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.ops.cross_entropy import cross_entropy

DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling()
TOKENS = jax.random.randint(jax.random.key(0), (4, 17), 0, 64)


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def model(recipe, gated=False, num_experts=0, router_z_loss=0.0, **options) -> fp8.GPT:
    """Between them, `gated` and not are every kind of norm, activation, position and bias."""
    shape = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "hidden_size": 32, "max_seq_len": 16}
    shape |= {"num_experts": num_experts, "router_z_loss": router_z_loss}
    if gated:
        shape |= {"num_kv_heads": 1, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
        shape |= {"qk_norm": True, "rotary_scaling": fp8.RotaryScaling(factor=8.0), "use_qkv_bias": True}
        shape |= {"use_bias": False, "tie_embeddings": False}
    return fp8.GPT(fp8.GPTConfig(**shape), recipe=recipe, **options)


def programs(gpt, tx, microbatches):
    """A model's gradients and its step, as programs that are not compiled, and what the step takes."""
    loss_fn = fp8.next_token_loss(gpt, ignore_label=3, z_loss=1e-4)
    variables = jax.eval_shape(gpt.init, jax.random.key(1), TOKENS[:, :-1])
    jax.jit(fp8.value_and_grad(loss_fn)).lower(variables, TOKENS)
    drawn = {"temperature": 1.0, "top_k": 4, "top_p": 0.5, "key": jax.random.key(0)}
    for options in ({}, drawn):
        write = partial(fp8.generate, gpt, max_new_tokens=3, stop_tokens=[1], **options)
        jax.eval_shape(write, variables, TOKENS[:, :9])
    state = jax.eval_shape(lambda variables: fp8.TrainState.create(variables=variables, tx=tx), variables)
    step = fp8.make_train_step(loss_fn, tx, gpt.recipe, microbatches)
    step.lower(state, TOKENS)
    if microbatches > 1:
        pending = jax.eval_shape(step.start, state)
        jax.eval_shape(lambda *args: step.accumulate_step(*args, True), state, pending, TOKENS)
        jax.eval_shape(step.apply_step, state, pending)


def train(gpt, tx, microbatches, **options) -> list[float]:
    """The losses of two steps."""
    loss_fn = fp8.next_token_loss(gpt, ignore_label=3, z_loss=1e-4)
    state = fp8.TrainState.create(variables=jax.jit(gpt.init)(jax.random.key(1), TOKENS[:, :-1]), tx=tx)
    step = fp8.make_train_step(loss_fn, tx, gpt.recipe, microbatches, **options)
    losses = []
    for _ in range(2):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    return losses


CASES = {
    "delayed": (model(DELAYED), fp8.fused_adamw(1e-2, max_grad_norm=1.0), 1),
    "gated": (model(DELAYED, gated=True), fp8.fused_adamw(1e-2, skip_nonfinite=True), 2),
    "bf16 params": (
        model(DELAYED, param_dtype=jnp.bfloat16, recompute=True),
        fp8.fused_adamw(1e-2, master_dtype="remainder", mu_dtype=jnp.bfloat16),
        2,
    ),
    "current": (model(CURRENT, head_recipe=CURRENT), fp8.fused_adamw(1e-2, mu_dtype=fp8.E4M3, nu_dtype=fp8.E5M2), 2),
    "block": (model(fp8.BlockScaling(), head_recipe=fp8.BlockScaling(), gated=True), fp8.fused_adamw(1e-2), 2),
    "none": (model(None, gated=True), fp8.fused_adamw(1e-2), 1),
    "experts": (model(DELAYED, gated=True, num_experts=4, router_z_loss=1e-3), fp8.fused_adamw(1e-2), 2),
    "experts, none": (model(None, num_experts=4), fp8.fused_adamw(1e-2), 1),
}


SLOW = ("current", "bf16 params")  # other cases have what they promote, but for how moments and masters are kept
SLOW_CURRENT = pytest.param("current", marks=pytest.mark.slow)


@pytest.mark.versions
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_strict_promotion(name):
    """Promotion happens, or is refused, where a program is traced and lowered."""
    with strict():
        programs(*CASES[name])


def test_losses_under_strict_promotion():
    """Attention is in float32 then (core/promotion.py), so they are not the same bits."""
    expected = train(*CASES["none"])
    with strict():
        losses = train(*CASES["none"])
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert losses[1] < losses[0]


@pytest.mark.versions
@pytest.mark.parametrize(
    "layer", [fp8.Dense(16), fp8.LayerNormDense(16, return_input=True), fp8.LayerNormMLP(32, "reglu")]
)
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "bf16"])
def test_layers_by_themselves(layer, recipe):
    """Any number of dims."""
    layer = layer.clone(recipe=recipe)
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    with strict():
        variables = jax.jit(layer.init)(jax.random.key(1), x)

        def loss_fn(variables, x):
            y = layer.apply(variables, x)
            return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(y))

        _, gradients, _ = jax.jit(fp8.value_and_grad(loss_fn))(variables, x)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.versions
def test_strict_is_strict():
    with strict():
        with pytest.raises(ValueError, match="jax_numpy_rank_promotion"):
            jnp.ones((2, 2)) + jnp.ones(2)
        with pytest.raises(ValueError, match="jax_numpy_dtype_promotion=strict"):
            jnp.ones(2, jnp.bfloat16) + jnp.ones(2)
    assert (jnp.ones((2, 2), jnp.bfloat16) + jnp.ones(2)).dtype == jnp.float32


@pytest.mark.parametrize(
    "name", [pytest.param("delayed", marks=pytest.mark.versions), SLOW_CURRENT, "block", "experts"]
)
def test_no_false_alarm_of_debug_nans(name):
    with jax.debug_nans(True):
        losses = train(*CASES[name], warm_start=name == "delayed")
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("jit", [True, False], ids=["eager", "disable_jit"])
@pytest.mark.parametrize(
    "recipe", [DELAYED, pytest.param(CURRENT, marks=pytest.mark.versions)], ids=["delayed", "current"]
)
def test_no_false_alarm_outside_of_jit(recipe, jit):
    """The NaN that stands for those of a tensor was computed for every tensor."""
    layer, x = fp8.Dense(16, recipe=recipe), jnp.ones((16, 16))
    with jax.debug_nans(True), contextlib.nullcontext() if jit else jax.disable_jit():
        variables = layer.init(jax.random.key(0), x)
        loss, grads, _ = fp8.value_and_grad(lambda v, x: jnp.mean(layer.apply(v, x).astype(jnp.float32)))(variables, x)
        for dtype in (fp8.E4M3, fp8.E5M2):
            fp8.quantize(x, dtype, 0.5)
        cross_entropy(jnp.ones((1, 2, 16)), jnp.asarray([[3, -100]]), mask=jnp.asarray([[True, False]]))
        if jit:  # the reference of Adam keeps products apart by a NaN that it never takes
            tx = fp8.fused_adamw(1e-2, mu_dtype=fp8.E4M3, nu_dtype=fp8.E5M2)
            fp8.apply_updates(variables["params"], tx.update(grads, tx.init(grads), variables["params"])[0])
    assert np.isfinite(loss)


@pytest.mark.versions
def test_a_nan_of_the_data_is_reported():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        fp8.quantize(jnp.asarray([1.0, jnp.inf]) - jnp.asarray([1.0, jnp.inf]), fp8.E4M3, 0.5)


@pytest.mark.versions
def test_the_loss_of_an_incomplete_step_is_a_nan_on_purpose():
    """`apply_step` says by it that nothing happened; who looks for NaNs is told, where it is called too early."""
    layer, x = fp8.Dense(16, recipe=None), jnp.ones((16, 16))
    tx = fp8.fused_adamw(1e-2)
    state = fp8.TrainState.create(variables=layer.init(jax.random.key(0), x), tx=tx)
    loss_fn = lambda v, x: jnp.mean(layer.apply(v, x).astype(jnp.float32))  # noqa: E731
    step = fp8.make_train_step(loss_fn, tx, None, 2, donate=False)
    with jax.debug_nans(True), pytest.warns(UserWarning, match="donate=False"):
        pending = step.accumulate_step(state, step.start(state), x, True)
        with pytest.raises(FloatingPointError, match="nan"):
            step.apply_step(state, pending)
        pending = step.accumulate_step(state, pending, x, False)
        assert np.isfinite(step.apply_step(state, pending)[2]["loss"])
