"""Room for arrays: full of NaN where the reference makes it, one call where the library does, and never a fill."""

import re
from functools import partial

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels import dispatch, extension
from jax_fp8.kernels.uninitialized import TARGET, uninitialized
from jax_fp8.parallel.overlap import OVERLAP_OPTIONS

needs_compiler = pytest.mark.skipif(
    h200.missing_reason() is not None or not extension.built(),
    reason=str(h200.missing_reason() or extension.missing_reason()),
)
SHAPES = {
    "kept": [jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)],
    "values": (jax.ShapeDtypeStruct((5,), E4M3), jax.ShapeDtypeStruct((5,), E5M2)),
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
    "nothing": jax.ShapeDtypeStruct((0, 2), jnp.float32),
    "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
    "mask": jax.ShapeDtypeStruct((2,), jnp.bool_),
}


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_what_nobody_has_written_cannot_be_read_unnoticed(transform):
    made = transform(lambda: uninitialized(SHAPES))()
    assert jax.tree.structure(made) == jax.tree.structure(SHAPES)
    for array, of in zip(jax.tree.leaves(made), jax.tree.leaves(SHAPES), strict=True):
        assert (array.shape, array.dtype) == (of.shape, of.dtype)
        if jnp.issubdtype(of.dtype, jnp.floating):
            assert np.isnan(np.asarray(array).astype(np.float32)).all()
        else:
            assert not np.asarray(array).any()  # there is no NaN


def test_room_for_nothing_is_nothing():
    assert uninitialized({"kept": [], "operands": ()}) == {"kept": [], "operands": ()}


def test_each_device_has_its_own():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    found = on_devices(lambda x: uninitialized([shape])[0].at[0].set(x[0]), jnp.arange(4.0).reshape(4, 1), pipe=4,
                       in_specs=P("pipe"), out_specs=P("pipe"))  # fmt: skip
    assert found.shape == (8, 3) and jnp.isnan(found[1::2]).all() and found[::2, 0].tolist() == [0, 1, 2, 3]


def lowered(platform) -> str:
    return jax.jit(lambda: uninitialized(SHAPES)).trace().lower(lowering_platforms=(platform,)).as_text()


def test_what_the_library_is_told(with_kernels):
    """One call without operands, whose results are the arrays in order; and none where there are no kernels."""
    ((target, operands, results),) = re.findall(r"custom_call @(jax_fp8_\w+)\((.*?)\).* -> (.*)", lowered("cuda"))
    assert (target, operands) == (TARGET, "")
    assert re.findall(r"tensor<(.*?)>", results) == [
        "3x4xbf16", "3x4xbf16", "2xi32", "2xi1", "0x2xf32", "f32", "5xf8E4M3FN", "5xf8E5M2",
    ]  # fmt: skip
    assert "jax_fp8_" not in lowered("cpu")


def test_a_build_without_kernels_fills_it(monkeypatch, traced_anew):
    monkeypatch.setattr(dispatch, "kernels_run", lambda: False)
    assert "jax_fp8_" not in lowered("cuda") and "0x7FC0" in lowered("cuda")


SLOT = jax.ShapeDtypeStruct((1024, 512), jnp.float32)


def fills_and_copies(make, slots=2) -> tuple[list, list]:
    """Of a loop that keeps arrays, and writes one of them in each turn: what it fills them with, and copies of them."""

    def turn(kept, number):
        def write(kept, at):
            return [*kept[:at], jnp.full(SLOT.shape, number, SLOT.dtype), *kept[at + 1 :]]

        return lax.switch(number % slots, [partial(write, at=at) for at in range(slots)], kept), None

    def run(numbers):
        return lax.scan(turn, make([SLOT] * slots), numbers)[0]

    numbers = jax.ShapeDtypeStruct((2 * slots,), jnp.int32)
    program = h200.compile(jax.jit(run), h200.shapes(numbers, h200.on_one_device()), **OVERLAP_OPTIONS)
    made = program.making("f32", *SLOT.shape)
    return [i for i in made if i.in_entry and not i.copies], [i for i in made if i.copies]


@needs_compiler
def test_nothing_is_filled_and_nothing_copied(with_kernels):
    """The compiler knows the target, and takes its results for the arrays of the loop as they are."""
    assert fills_and_copies(uninitialized) == ([], [])


@needs_compiler
def test_a_fill_and_a_copy_would_be_seen(with_kernels):
    """Negative control: zeros, and one array that is to become two."""
    fills, _ = fills_and_copies(lambda shapes: [jnp.zeros(of.shape, of.dtype) for of in shapes])
    _, copies = fills_and_copies(lambda shapes: [uninitialized(shapes)[0]] * len(shapes))
    assert fills and copies
