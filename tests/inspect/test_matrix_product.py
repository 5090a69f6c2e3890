"""kinds: which matrix products share a row of the table."""

import pytest

from jax_fp8.inspect.matrix_product import MatrixProduct, kinds


def product(layer, n=16, count=1):
    return MatrixProduct(layer, 16, n, 16, "bfloat16 bfloat16", "xla", count, False, False, "why")


@pytest.mark.parametrize(
    ("layers", "rows"),
    [
        ([product("a_0"), product("a_1"), product("a_3")], ["a_{0,1,3} x3"]),
        ([product("a_0"), product("a_1", n=32), product("a_2")], ["a_{0,2} x2", "a_1 x1"]),
        ([product("a_0", count=5), product("a_1")], ["a_0 x5", "a_1 x1"]),
        ([product("a_0/b_0"), product("a_0/b_1"), product("a_1/b_0")], ["a_{0..1}/b_0 x2", "a_0/b_1 x1"]),
        ([product(f"a_{i}/b_{j}") for i in range(3) for j in range(2)], ["a_{0..2}/b_{0..1} x6"]),
        ([product("jvp(a_1)"), product("jvp(a_2)"), product("a_1")], ["jvp(a_{1..2}) x2", "a_1 x1"]),
        ([product("a"), product("a", count=2)], ["a x3"]),
    ],
    ids=["gaps", "another shape", "another count", "not a product of numbers", "two numbers", "scopes", "no number"],
)
def test_rows_that_differ_stay_apart(layers, rows):
    assert [f"{kind.layer} x{kind.count}" for kind in kinds(layers)] == rows
