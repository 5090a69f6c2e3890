"""What a layer meets of a recorder: Refs that are the same ones after any transformation,
and a list of GEMMs where one is kept.

What is recorded through a backward pass is tested in tests/train/test_gradients.py.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_fp8.core.fp8_gemm import Record
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.recorder import ByIdentity, ListedGemm, Recorder, listing, register_gemm

pytestmark = pytest.mark.versions
RECIPE = CurrentScaling()


def test_refs_are_static_and_the_slot_is_data():
    amax, *sums = (ByIdentity(jax.new_ref(jnp.zeros(3))) for _ in range(3))
    recorder = Recorder(amax, tuple(sums), 0.5, from_current=True, slot=jnp.arange(2))
    assert jax.tree.leaves(recorder)[0] is recorder.slot and len(jax.tree.leaves(recorder)) == 1
    again = jax.tree.map(lambda slot: slot[1], recorder)
    record = again.record
    assert record.amax_ref is amax.ref and again.from_current and int(record.slot) == 1
    assert record.gradient.weight == 0.5
    assert all(ref is total.ref for ref, total in zip(record.gradient.refs, sums, strict=True))
    assert jax.tree.structure(recorder) == jax.tree.structure(again)
    other = Recorder(ByIdentity(jax.new_ref(jnp.zeros(3))), tuple(sums), 0.5, from_current=True, slot=jnp.arange(2))
    assert jax.tree.structure(recorder) != jax.tree.structure(other)


def test_without_sums_there_is_no_gradient_to_add():
    assert Recorder(None, (), 1.0, False, None).record == Record()


def test_gemms_are_listed_once_where_somebody_lists_them():
    register_gemm(("nobody", "listens"), RECIPE, False)
    with listing() as found:
        register_gemm(("b",), RECIPE, True)
        register_gemm(("a",), RECIPE, True)
        register_gemm(("b",), RECIPE, False)
    register_gemm(("too", "late"), RECIPE, True)
    assert list(found.items()) == [(("b",), ListedGemm(RECIPE, False)), (("a",), ListedGemm(RECIPE, True))]
