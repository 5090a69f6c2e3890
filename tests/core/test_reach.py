"""Which rows a pass says that it stages."""

import jax.numpy as jnp

from jax_fp8.core.reach import note_rows, reached_in, reached_rows

STATE = {
    "b": {"scale": jnp.ones(3), "amax_history": jnp.zeros((3, 2))},
    "a": {"dense": {"scale": jnp.ones((2, 3)), "amax_history": jnp.zeros((2, 3, 2))}},
}


def test_rows_are_collected_by_the_path_of_their_gemm_and_found_in_the_order_of_joined_amaxes():
    with reached_rows() as found:
        note_rows(("a", "dense"), [0, 1])
        note_rows(("b",), [2])
        note_rows(None, [1])  # of a pass of which nobody asks
    note_rows(("b",), [0])  # outside of it
    stacked, alone = (True, True, False), (False, False, True)
    assert reached_in(STATE, found) == (*stacked, *stacked, *alone)
    assert reached_in(STATE, set()) == (False,) * 9 and reached_in({}, found) == ()


def test_who_asks_inside_another_does_not_disturb_it():
    with reached_rows() as outer:
        with reached_rows() as inner:
            note_rows(("b",), [1])
        note_rows(("b",), [2])
    assert (inner, outer) == ({(("b",), 1)}, {(("b",), 2)})
