"""Objects made of functions: one sentence where they are pickled, and copies that are the object itself."""

import copy
import pickle

import pytest

from jax_fp8.core.unpicklable import UnpicklableFunction


def test_a_function_says_its_sentence_and_is_its_own_copy():
    function = UnpicklableFunction(lambda x, y=1: x + y, "this cannot be pickled; make it anew")
    assert function(2, y=3) == 5
    assert copy.copy(function) is function and copy.deepcopy([function])[0] is function
    with pytest.raises(ValueError, match=r"^this cannot be pickled; make it anew$"):
        pickle.dumps({"tx": function})
