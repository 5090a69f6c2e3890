"""A compilation keeps the listing of what will be launched, the last that was written, and is jax's own otherwise."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jax_fp8.train.lowering import Lowering


@pytest.mark.parametrize("passes_changed_something", [True, False])
def test_the_listing_written_last_is_kept(passes_changed_something):
    """A device's compiler may compile candidates first, to time them."""

    class Writing:
        def compile(self, compiler_options):
            names = ["module_9.candidate.thunk_sequence", "module_9.candidate.thunk_sequence_after_thunk_passes"]
            names += ["module_1.f.thunk_sequence"]
            names += ["module_1.f.thunk_sequence_after_thunk_passes"] if passes_changed_something else []
            for seconds, name in enumerate([*names, "module_1.f.thunk_metadata"]):
                path = pathlib.Path(compiler_options["xla_dump_to"], f"{name}.txt")
                path.write_text(name)
                os.utime(path, (seconds, seconds))

    expected = "module_1.f.thunk_sequence" + "_after_thunk_passes" * passes_changed_something
    assert Lowering(Writing()).compile().thunks == expected


def test_a_lowering_is_jax_s_own_otherwise():
    program = jax.jit(lambda x: {"sum": x + 1}).lower(jnp.ones(3))
    lowering = Lowering(program)
    assert lowering.as_text() == program.as_text()
    assert lowering.compile()(jnp.ones(3))["sum"].tolist() == [2, 2, 2]
    assert lowering.compile().out_tree == program.out_tree
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lowering.no_such_name
