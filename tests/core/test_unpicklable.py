"""Objects made of functions: one sentence where they are pickled, and copies that are the object itself."""

import copy
import pickle

import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.core.unpicklable import UnpicklableFunction


def test_a_function_says_its_sentence_and_is_its_own_copy():
    function = UnpicklableFunction(lambda x, y=1: x + y, "this cannot be pickled; make it anew")
    assert function(2, y=3) == 5
    assert copy.copy(function) is function and copy.deepcopy([function])[0] is function
    with pytest.raises(ValueError, match=r"^this cannot be pickled; make it anew$"):
        pickle.dumps({"tx": function})


@pytest.mark.parametrize("make", [fp8.fused_adam, fp8.fused_adamw])
def test_an_optimizer_is_not_pickled_and_its_state_is(make):
    tx = make(1e-3)
    with pytest.raises(ValueError, match=r"^an optimizer cannot be pickled, .*; pickle its state, and call fused"):
        pickle.dumps(tx)
    for copied in (copy.copy(tx), copy.deepcopy(tx)):
        assert copied.init is tx.init and copied.update is tx.update
    state = tx.init({"w": jnp.ones(3)})
    assert int(pickle.loads(pickle.dumps(state)).count) == 0
