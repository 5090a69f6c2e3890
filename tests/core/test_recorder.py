"""What a layer meets of a recorder: Refs that are the same ones after any transformation,
and a list of GEMMs where one is kept.

What is recorded through a backward pass is tested in tests/grads/test_gradients.py.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_fp8.core.fp8_gemm import GradientSum, Record
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.recorder import (
    Cotangents,
    ListedGemm,
    Recorder,
    Refs,
    kernel_mark,
    listed_gemms,
    listing,
    register_gemm,
)

pytestmark = pytest.mark.versions
RECIPE = CurrentScaling()


def recorder(**options) -> Recorder:
    gradient = GradientSum((jax.new_ref(jnp.zeros((16, 16))),), 0.5)
    record = Record(jax.new_ref(jnp.zeros((2, 3))), gradient=gradient)
    return Recorder(Refs(record=record, from_current=True, **options), jnp.arange(2))


def test_refs_are_static_and_the_slot_is_data():
    one = recorder()
    assert jax.tree.leaves(one)[0] is one.slot and len(jax.tree.leaves(one)) == 1
    again = jax.tree.map(lambda slot: slot[1], one)
    record, given = again.record, one.refs.record
    assert record.amax_ref is given.amax_ref and again.from_current and int(record.slot) == 1
    assert record.gradient is given.gradient
    assert jax.tree.structure(one) == jax.tree.structure(again) != jax.tree.structure(recorder())


def test_without_refs_there_is_nothing_to_write_to():
    assert Recorder(Refs(record=Record())).record == Record()


@pytest.mark.parametrize("transform", [jax.vmap, lambda fn: lambda x: lax.cond(x[0] > 0, fn, fn, x[0])])
def test_where_no_ref_is_what_is_needed_is_refused(transform):
    """Amaxes leave as a cotangent there, and what may be missing does not."""

    def leaves(**options):
        made = recorder(cotangents=Cotangents(), **options)
        found = []
        jax.make_jaxpr(transform(lambda x: (found.append(made.record), x)[1]))(jnp.ones(2))
        return {record.cotangent is not None and record.amax_ref is None for record in found}

    assert leaves() == {True}
    with pytest.raises(ValueError, match=r"cannot reach its Ref, got one that measures dy_amax; take the layer out"):
        leaves(needed=("dy_amax",))


def test_gemms_are_listed_once_where_somebody_lists_them():
    register_gemm(("nobody", "listens"), RECIPE, (), False)
    with listing() as found:
        register_gemm(("b",), RECIPE, (), True)
        register_gemm(("a",), RECIPE, (), True)
        assert listed_gemms() == (("b",), ("a",))
        register_gemm(("b",), RECIPE, (), False)
    register_gemm(("too", "late"), RECIPE, (), True)
    assert list(found.items()) == [(("b",), ListedGemm(RECIPE, False)), (("a",), ListedGemm(RECIPE, True))]
    assert listed_gemms() == ()


@pytest.mark.parametrize("marks", [True, False])
def test_kernels_have_names_in_a_program_where_they_are_asked_for(marks):
    kernels = jnp.ones(2), jnp.ones(3)
    with listing(marks_kernels=marks):
        program = str(jax.make_jaxpr(lambda kernels: register_gemm(("a", "b"), RECIPE, kernels, False))(kernels))
    assert [kernel_mark(("a", "b"), number) in program for number in range(2)] == [marks] * 2
