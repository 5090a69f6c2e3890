"""Room for operands is filled in the order of calls, in the row of the layer that calls.

What a backward pass keeps there is tested in tests/grads/test_delayed.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.core.deferral import Notes, OperandSearch, OperandStore, OperandStores, shapes_of
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array

pytestmark = pytest.mark.versions


def operands(value, m=4) -> tuple[Fp8Array, Fp8Array]:
    """xᵀ (2, m) and dyᵀ (3, m), all of one value."""
    scale = jnp.float32(value)
    return Fp8Array(jnp.full((2, m), value, E4M3), scale), Fp8Array(jnp.full((3, m), -value, E5M2), scale)


def leaves(x, dy) -> tuple:
    return x.values, x.scale, dy.values, dy.scale


def store(calls=1, layers=None, m=4) -> OperandStore:
    leading = (*([layers] if layers else []), *([calls] if calls > 1 else []))
    refs = tuple(jax.new_ref(jnp.zeros(leading + of.shape, of.dtype)) for of in leaves(*operands(0, m)))
    count = jax.new_ref(jnp.zeros((layers,) if layers else (), jnp.int32)) if calls > 1 else None
    return OperandStore(refs, count, shapes_of(leaves(*operands(0, m))))


def kept(of: OperandStore) -> np.ndarray:
    """The scales of xᵀ, once it is seen that they are those of all."""
    x, scale, dy, dy_scale = (np.asarray(ref[...], np.float32) for ref in of.refs)
    np.testing.assert_array_equal(x, np.broadcast_to(scale[..., None, None], x.shape))
    np.testing.assert_array_equal(dy, -np.broadcast_to(dy_scale[..., None, None], dy.shape))
    return scale


def test_calls_that_look_alike_have_room_side_by_side():
    several, one = store(calls=2), store(m=8)
    stores = OperandStores((several, one))
    for value, m in ((1, 4), (5, 8), (2, 4)):
        stores.keep(*operands(value, m), None, "layer", "split")
    np.testing.assert_array_equal(kept(several), [1, 2])
    assert kept(one) == 5


def test_a_layer_that_is_stacked_has_its_own_row():
    rows, calls = store(layers=2), store(layers=2, calls=2)
    for slot, value in ((1, 1), (0, 2), (1, 3)):
        OperandStores((calls,)).keep(*operands(value), jnp.int32(slot), "layer", "split")
    for slot in (1, 0):
        OperandStores((rows,)).keep(*operands(slot + 5), jnp.int32(slot), "layer", "split")
    np.testing.assert_array_equal(kept(calls), [[2, 0], [1, 3]])
    np.testing.assert_array_equal(kept(rows), [5, 6])


def test_operands_for_which_there_is_no_room_are_no_secret():
    with pytest.raises(ValueError, match="not enough values"):
        OperandStores((store(m=8),)).keep(*operands(1), None, "layer", "split")


def test_a_search_notes_what_looks_alike_once():
    notes = Notes()
    search = OperandSearch(jax.new_ref(jnp.int32(0)), 7, notes)
    for m, accumulation in ((4, "split"), (8, "split"), (4, "split"), (4, "fast")):
        search.keep(*operands(1, m), None, "layer", accumulation)
    assert int(search.mark[...]) == 4
    assert [(of.types[0].shape[1], of.accumulation, of.gemm) for of in notes.found] == [
        (4, "split", 7),
        (8, "split", 7),
        (4, "fast", 7),
    ]
