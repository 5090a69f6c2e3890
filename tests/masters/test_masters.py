"""A master and its param are one truth: a param that is loaded, replaced or edited becomes the master, by every way to
take a step; nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deltas import WARNS, by_deltas
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.optim.adam_state import masters_apart
from jax_fp8.optim.updates import InPlace

SHAPE = (32, 32)
KINDS = {
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "bfloat16, float16 masters": (jnp.bfloat16, jnp.float16),
    "bfloat16, remainders": (jnp.bfloat16, "remainder"),
    "float16": (jnp.float16, jnp.float32),
    "float16, float16 masters": (jnp.float16, jnp.float16),
    "E4M3": (fp8.E4M3, jnp.float32),
    "E5M2, float16 masters": (fp8.E5M2, jnp.float16),
}
ALL = pytest.mark.parametrize("kind", KINDS)
MODES = pytest.mark.parametrize("in_place", [None, InPlace()], ids=["deltas", "in_place"])


def as_param(x, dtype):
    return fp8.quantize(x, dtype, jnp.max(jnp.abs(x)) / 400) if dtype in (fp8.E4M3, fp8.E5M2) else x.astype(dtype)


def in_float32(param) -> np.ndarray:
    return np.asarray(param.dequantize() if isinstance(param, fp8.Fp8Array) else param, np.float32)


def normal(seed=0):
    return jax.random.normal(jax.random.key(seed), SHAPE)


def make_step(tx, in_place):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **({} if in_place is None else {"in_place": in_place}))
        return fp8.apply_updates(params, updates), state

    return step


def trained(kind, in_place, steps=3):
    """A tree whose masters have bits that its params lack, its state, and the step."""
    dtype, master_dtype = KINDS[kind]
    tx = fp8.fused_adamw(1e-3, master_dtype=master_dtype)
    params, step = {"w": as_param(normal(), dtype), "own": jnp.ones(3)}, make_step(tx, in_place)
    state = tx.init(params)
    for seed in range(steps):
        params, state = step(params, state, {"w": normal(seed + 1), "own": jnp.ones(3)})
    return params, state, step


@MODES
@ALL
def test_replaced_params_are_where_the_next_step_starts(kind, in_place):
    """Ten times as large, so that scales from before would saturate; then masters grow in them again."""
    params, state, step = trained(kind, in_place)
    loaded = as_param(10 * normal(9), KINDS[kind][0])
    grads = {"w": normal(8), "own": jnp.ones(3)}
    after, state = step(params | {"w": loaded}, state, grads)
    rounding = {1: 0.14, 2: 0.01}[jnp.dtype(KINDS[kind][0]).itemsize]
    np.testing.assert_allclose(in_float32(after["w"]), in_float32(loaded), rtol=rounding, atol=0.1)
    assert int(masters_apart(state, after)) == 0
    unchanged, _ = step(params, trained(kind, in_place)[1], grads)
    with pytest.raises(AssertionError):  # the control
        np.testing.assert_allclose(in_float32(unchanged["w"]), in_float32(loaded), rtol=rounding, atol=0.1)


@MODES
@ALL
def test_an_edited_element_leaves_all_other_masters_alone(kind, in_place):
    params, state, step = trained(kind, in_place)
    apart = np.zeros(SHAPE, bool)
    apart[5, 7] = True
    if isinstance(params["w"], fp8.Fp8Array):
        values = params["w"].values
        edited = fp8.Fp8Array(jnp.where(apart, values[0, 0], values), params["w"].scale)
    else:
        edited = jnp.where(apart, params["w"][0, 0], params["w"])
    grads = {"w": normal(8), "own": jnp.ones(3)}
    before, unedited = step(params, state, grads)
    after, state = step(params | {"w": edited}, state, grads)
    different = np.asarray(state.master["w"]) != np.asarray(unedited.master["w"])
    assert_same_bits(different | apart, apart)
    assert different[5, 7] or "remainders" in kind
    assert in_float32(after["w"])[5, 7] != in_float32(before["w"])[5, 7]
    jax.tree.map(assert_same_bits, state.mu, unedited.mu)


@ALL
def test_params_that_nobody_edits_have_the_masters_bits(kind):
    """The negative control of both: a step of a state starts from its masters, whose bits no param has."""
    params, state, step = trained(kind, InPlace())
    assert int(masters_apart(state, params)) == 0
    if KINDS[kind][1] != jnp.float32:
        return
    master = np.asarray(state.master["w"], np.float32)
    assert (master != in_float32(params["w"])).mean() > 0.9
    still = {"w": jnp.zeros(SHAPE), "own": jnp.ones(3)}
    frozen = state._replace(mu=jax.tree.map(jnp.zeros_like, state.mu))
    decayed = np.asarray(step(params, frozen, still)[1].master["w"], np.float32)
    np.testing.assert_allclose(decayed, master * np.float32(1 - 1e-3 * 1e-4), rtol=1e-6)


@pytest.mark.parametrize("master_dtype", [jnp.float32, jnp.float16, "remainder"])
@WARNS
@pytest.mark.parametrize("wrap", [lambda tx: tx, by_deltas], ids=["in_place", "deltas"])
def test_loaded_params_stay_in_make_train_step(wrap, master_dtype):
    x = jax.random.normal(jax.random.key(0), (64, 32))
    layer = fp8.Dense(32, recipe=None, param_dtype=jnp.bfloat16)
    tx = wrap(fp8.fused_adamw(1e-5, master_dtype=master_dtype))
    state = fp8.TrainState.create(variables=layer.init(jax.random.key(1), x), tx=tx)
    step = fp8.make_train_step(lambda v, x: jnp.mean((layer.apply(v, x) - x) ** 2), tx, None)
    state, metrics = step(state, x)
    assert metrics["loss"] > 1
    identity = {"kernel": jnp.eye(32, dtype=jnp.bfloat16), "bias": jnp.zeros(32, jnp.bfloat16)}
    state = state.replace(params=identity)
    for _ in range(3):
        state, metrics = step(state, x)
        assert metrics["loss"] < 1e-4


@MODES
@ALL
def test_a_step_that_is_skipped_leaves_the_masters_of_edited_params_alone(kind, in_place):
    dtype, master_dtype = KINDS[kind]
    tx = fp8.fused_adamw(1e-3, master_dtype=master_dtype, skip_nonfinite=True)
    step, edited = make_step(tx, in_place), {"w": as_param(normal(1), dtype)}
    before = tx.init({"w": as_param(normal(), dtype)})
    params, skipped = step(edited, before, {"w": normal(2).at[3, 4].set(jnp.nan)})
    jax.tree.map(assert_same_bits, (params, skipped), (edited, before))
    _, taken = step(edited, before, {"w": normal(2)})  # the control: it would have changed them
    assert int(taken.count) == 1 and np.mean(np.asarray(taken.master["w"]) != np.asarray(before.master["w"])) > 0.9
