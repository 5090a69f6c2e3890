"""Rules that follow the types of Explicit meshes: the numbers of one device, split as told, and nothing elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.kernels import explicit

pytestmark = pytest.mark.versions


def make_mesh(axis_type=AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)


def put(array, *spec, mesh=None) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh or make_mesh(), P(*spec)))


def integers(seed, *shape) -> np.ndarray:
    """Exact in float32, and so are their products and sums."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def spec(array) -> tuple:
    return tuple(jax.typeof(array).sharding.spec)


def test_parse_rule():
    assert explicit.parse_rule("m k, n k, , -> m n") == ([["m", "k"], ["n", "k"], [], []], [["m", "n"]])


def test_the_first_operand_decides_and_no_array_is_split_twice_by_an_axis():
    inputs, outputs = explicit.parse_rule("m k, k n -> m n")
    by_both = explicit.collect(inputs, outputs, [("data", None), ("data", "tensor")])
    assert by_both == {"m": ("data",), "n": ("tensor",)}  # k stands beside m, which "data" splits
    assert explicit.collect(inputs, outputs, [("data", None), (None, "data")]) == {"m": ("data",)}
    assert explicit.spec_of(["m", "n", "k"], {"m": ("data",), "n": ()}) == P(("data",), None, None)


def test_off_explicit_meshes_nothing_happens():
    x = jnp.ones((8, 4))
    for array in (x, put(np.ones((8, 4)), "data", mesh=make_mesh(AxisType.Auto))):
        assert explicit.explicit_mesh(array) is None
        assert explicit.whole(array) is array and explicit.whole_rows(array) is array
        assert explicit.shards_of(array, 0) == 1
    assert explicit.explicit_mesh(x, put(np.ones((8, 4)), "data")) is not None


PRODUCTS = {  # splits of x (b, s, k) and of a kernel (k, n), and of their product
    "data": (("data",), (), "data", None),
    "fsdp rows": (("data",), ("data",), "data", None),
    "fsdp columns": (("data",), (None, "data"), "data", None),
    "by columns": (("data",), (None, "tensor"), "data", "tensor"),
    "by rows": (("data", None, "tensor"), ("tensor",), "data", None),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case):
    x_spec, kernel_spec, rows, columns = PRODUCTS[case]
    x, kernel = integers(0, 8, 4, 16), integers(1, 16, 8)
    placed = put(x, *x_spec), put(kernel, *kernel_spec)
    got = jax.jit(explicit.product)(*placed)
    assert_same_bits(got, x @ kernel)
    assert got.sharding.is_equivalent_to(NamedSharding(make_mesh(), P(rows, None, columns)), 3)
    gradients = jax.jit(jax.grad(lambda *operands: jnp.sum(explicit.product(*operands)), argnums=(0, 1)))(*placed)
    expected = jax.grad(lambda *operands: jnp.sum(operands[0] @ operands[1]), argnums=(0, 1))(x, kernel)
    jax.tree.map(assert_same_bits, gradients, expected)
    for gradient, operand in zip(gradients, placed, strict=True):
        assert gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)


def test_jax_itself_would_ask():
    """Negative control: without a rule, two operands that disagree are an error."""
    with pytest.raises(Exception, match=r"illegally sharded|out_sharding|[Ss]harding"):
        jax.jit(jnp.matmul)(put(integers(0, 8, 16), "data"), put(integers(1, 16, 8), None, "data"))


@pytest.mark.parametrize("table_spec", [(), ("data",), (None, "data"), ("tensor",), (None, "tensor")], ids=str)
def test_lookup(table_spec):
    table, tokens = integers(0, 16, 8), np.random.default_rng(1).integers(0, 16, (8, 4))
    placed = put(table, *table_spec), put(tokens, "data")
    got = jax.jit(explicit.lookup)(*placed)
    assert_same_bits(got, table[tokens])
    assert spec(got)[0] in ("data", ("data",))
    gradient = jax.jit(jax.grad(lambda table, tokens: jnp.sum(explicit.lookup(table, tokens))))(*placed)
    assert_same_bits(gradient, jax.grad(lambda table: jnp.sum(table[tokens]))(table))
    assert gradient.sharding.is_equivalent_to(placed[0].sharding, 2)


@pytest.mark.versions
@pytest.mark.parametrize("table_spec", [None, (), ("tensor",), (None, "tensor")], ids=str)
def test_lookup_of_what_is_not_there(table_spec):
    table, indices = integers(0, 16, 8), np.int32([[0, 15, 16, -1], [-16, 2**31 - 1, -(2**31), 3]] * 4)
    placed = (table, indices) if table_spec is None else (put(table, *table_spec), put(indices, "data"))
    got = np.asarray(jax.jit(explicit.lookup)(*placed))
    is_there = (indices >= 0) & (indices < 16)
    np.testing.assert_array_equal(got, np.where(is_there[..., None], table[indices % 16], np.nan))
    assert is_there.any() and not is_there.all()


@pytest.mark.parametrize("table_spec", [(), ("data",), (None, "data"), ("data", "tensor")], ids=str)
def test_whole(table_spec):
    table = integers(0, 16, 8)
    placed = put(table, *table_spec)
    for dim, expected in ((-2, table[0]), (-1, table[:, 0])):
        got = jax.jit(explicit.whole_first, static_argnums=1)(placed, dim)
        assert_same_bits(got.reshape(-1), expected)
        assert got.sharding.is_fully_replicated
    for dim, axes in enumerate((*table_spec, None, None)[:2]):
        assert explicit.shards_of(placed, dim) == {"data": 4, "tensor": 2, None: 1}[axes]
    assert explicit.whole(placed).sharding.is_fully_replicated
    assert spec(explicit.whole_rows(placed))[-1] is None
    row = put(integers(2, 8), "data")
    assert_same_bits(explicit.like_columns(row, placed), integers(2, 8))
    assert spec(explicit.like_columns(row, placed)) == (spec(placed)[-1],)


def test_new_arrays_lie_on_the_mesh():
    x, found = put(integers(0, 16, 8), "data"), []

    @explicit.inside_its_mesh
    def run(tree):
        found.extend([jnp.zeros(3), explicit.zeros_like(tree["x"], jnp.bfloat16)])
        return tree["x"] * 2

    for function in (run, jax.jit(run)):
        function({"x": x})
        zeros, like_x = (jax.typeof(array) for array in found[-2:])
        assert not zeros.sharding.mesh.empty and spec(found[-1])[0] == "data" and like_x.dtype == jnp.bfloat16
    assert jax.typeof(jnp.zeros(3)).sharding.mesh.empty
    assert run({"x": jnp.ones(3)}).shape == (3,) and jax.typeof(found[-2]).sharding.mesh.empty
