"""`flax.serialization` of FP8 arrays, pairs and training states:
through bytes and back to the same bits, or one sentence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair

pytestmark = pytest.mark.versions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SimpleState:
    """A state as it was before it had collections."""

    step: Any
    params: Any
    fp8: Any
    opt_state: Any
    cache: Any


def quantized() -> fp8.Fp8Array:
    return fp8.quantize(jax.random.normal(jax.random.key(0), (16, 32)), fp8.E4M3, jnp.float32(0.3))


def pair(shared: bool) -> Fp8Pair:
    array = quantized()
    if shared:
        return Fp8Pair.with_shared_scale(array.values, array.values.T, array.scale, jnp.float32(3))
    return Fp8Pair(array, fp8.Fp8Array(array.values.T, jnp.float32(0.7)), jnp.float32(3))


def check_through_bytes(value):
    """Into an empty one of the same structure."""
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, value), serialization.to_bytes(value))
    assert jax.tree.structure(restored) == jax.tree.structure(value)
    jax.tree.map(lambda a, b: assert_same_bits(np.asarray(a), np.asarray(b)), restored, value)


def test_an_array():
    check_through_bytes({"w": quantized(), "b": jnp.ones(3)})


@pytest.mark.parametrize("shared", [True, False])
def test_a_pair(shared):
    check_through_bytes(pair(shared))
    assert ("scale" in serialization.to_state_dict(pair(shared))) == shared


def test_a_training_state_with_its_cache():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    layer = fp8.Dense(32, recipe=recipe)
    variables = layer.init(jax.random.key(1), jnp.ones((16, 16)))
    cache = fp8.cast_weights(variables, recipe)
    state = fp8.TrainState.create(variables={**variables, "fp8_cache": cache}, tx=optax.adam(1e-3))
    check_through_bytes(state)


def test_a_training_state_with_collections():
    """Without any it is saved as it was before there were such."""
    variables = {"params": {"w": jnp.ones(3)}, "batch_stats": {"norm": {"mean": jnp.arange(3.0)}}}
    with_stats = fp8.TrainState.create(variables=variables, tx=optax.adam(1e-3))
    check_through_bytes(with_stats)
    without = with_stats.replace(collections={})
    check_through_bytes(without)
    assert set(serialization.to_state_dict(without)) == {"step", "params", "fp8", "opt_state", "cache"}
    for target, saved in ((with_stats, without), (without, with_stats)):
        with pytest.raises(ValueError, match=r"a saved TrainState must hold .*; restore it into its like"):
            serialization.from_bytes(target, serialization.to_bytes(saved))


def test_orbax_gives_back_collections_and_states_without_any(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    variables = {"params": {"w": jnp.ones(3)}, "batch_stats": {"norm": {"mean": jnp.arange(3.0)}}}
    state = fp8.TrainState.create(variables=variables, tx=optax.adam(1e-3))
    before = {name: getattr(state, name) for name in ("step", "params", "fp8", "opt_state", "cache")}
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.save(tmp_path / "before", SimpleState(**before))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
        old = checkpointer.restore(tmp_path / "before", state.replace(collections={}))
    for ours, theirs in ((restored, state), (old, state.replace(collections={}))):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(lambda a, b: assert_same_bits(np.asarray(a), np.asarray(b)), ours, theirs)


def test_what_belongs_to_something_else_is_refused():
    saved = serialization.to_state_dict(quantized())
    with pytest.raises(
        ValueError, match=r"a saved Fp8Pair must hold \['amax', 'scale', 'values', 'values_t'\], got \['scale'"
    ):
        serialization.from_state_dict(pair(True), saved)
    with pytest.raises(ValueError, match=r"a saved Fp8Array must hold \['scale', 'values'\], got \['values'\]"):
        serialization.from_state_dict(quantized(), {"values": saved["values"]})
