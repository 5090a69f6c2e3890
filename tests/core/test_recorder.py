"""What a layer meets of a recorder: Refs that are the same ones after any transformation, and a list of GEMMs where one is kept.

What is recorded through a backward pass is tested in tests/train/test_gradients.py.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_fp8.core.recorder import ByIdentity, Recorder, listing, register_gemm

pytestmark = pytest.mark.versions


def test_refs_are_static_and_the_slot_is_data():
    amax, total = (ByIdentity(jax.new_ref(jnp.zeros(3))) for _ in range(2))
    recorder = Recorder(amax, total, 0.5, from_current=True, slot=jnp.arange(2))
    assert jax.tree.leaves(recorder)[0] is recorder.slot and len(jax.tree.leaves(recorder)) == 1
    again = jax.tree.map(lambda slot: slot[1], recorder)
    assert again.amax_ref is amax.ref and again.from_current and int(again.slot) == 1
    assert again.gradient.ref is total.ref and again.gradient.weight == 0.5
    assert jax.tree.structure(recorder) == jax.tree.structure(again)
    other = Recorder(ByIdentity(jax.new_ref(jnp.zeros(3))), total, 0.5, from_current=True, slot=jnp.arange(2))
    assert jax.tree.structure(recorder) != jax.tree.structure(other)


def test_without_sums_there_is_no_gradient_to_add():
    assert Recorder(None, None, 1.0, False, None).gradient is None
    assert Recorder(None, None, 1.0, False, None).amax_ref is None


def test_gemms_are_listed_once_where_somebody_lists_them():
    register_gemm(("nobody", "listens"))
    with listing() as found:
        register_gemm(("b",))
        register_gemm(("a",))
        register_gemm(("b",))
    register_gemm(("too", "late"))
    assert list(found) == [("b",), ("a",)]
