"""What shards send to each other, as it is written: every place in a jaxpr where a collective can stand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from holders import in_a_while_loop, with_a_jvp, with_a_vjp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.inspect.written_collectives import WrittenCollective, merged, table, written

pytestmark = pytest.mark.versions

AREA = 64 * 64
X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def sharded(function, **options):
    return jax.shard_map(function, **{"mesh": mesh(), "in_specs": P(), "out_specs": P(), "check_vma": False} | options)


def sent(function, *arguments) -> list[WrittenCollective]:
    return merged(written(jax.make_jaxpr(function)(*arguments).jaxpr))


def in_short(collectives):
    return [(each.name, each.count, each.devices, each.wire_bytes) for each in collectives]


def gathered(x):
    return lax.all_gather(x, "tensor", tiled=True)


# A collective of bfloat16 (64, 64), and how it must be listed.
KINDS = {
    "psum": (lambda x: lax.psum(x, "data"), ("psum", 1, 2, 2 * AREA)),
    "psum over two axes": (lambda x: lax.psum(x, ("data", "tensor")), ("psum", 1, 8, 2 * 2 * AREA * 7 // 8)),
    "pmean": (lambda x: lax.pmean(x, "tensor"), ("psum", 1, 4, 2 * 2 * AREA * 3 // 4)),
    "pmax": (lambda x: lax.pmax(x, "data"), ("pmax", 1, 2, 2 * AREA)),
    "pmin": (lambda x: lax.pmin(x, "data"), ("pmin", 1, 2, 2 * AREA)),
    "all_gather": (gathered, ("all_gather", 1, 4, 2 * AREA * 3)),
    "groups": (
        lambda x: lax.all_gather(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]),
        ("all_gather", 1, 2, 2 * AREA),
    ),
    "fp8": (lambda x: gathered(x.astype(fp8.E4M3)), ("all_gather", 1, 4, AREA * 3)),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "tensor", tiled=True),
        ("psum_scatter", 1, 4, 2 * AREA * 3 // 4),
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True), ("all_to_all", 1, 4, 2 * AREA * 3 // 4)),
    "ppermute": (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), ("ppermute", 1, 2, 2 * AREA)),
    "ppermute to itself": (lambda x: lax.ppermute(x, "data", [(0, 0), (1, 1)]), ("ppermute", 1, 1, 0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind):
    function, expected = KINDS[kind]
    assert in_short(sent(sharded(function), X)) == [expected]


def test_an_array_is_described():
    (gather,) = sent(sharded(KINDS["fp8"][0]), X)
    assert (gather.dtype, gather.shape, gather.axes) == ("float8_e4m3fn", (256, 64), ("tensor",))
    (scatter,) = sent(sharded(KINDS["psum_scatter"][0]), X)
    assert (scatter.dtype, scatter.shape, scatter.axes) == ("bfloat16", (64, 64), ("tensor",))


PSUM, SENT = KINDS["psum"]
NESTED = {
    "jit": (jax.jit(PSUM), 1),
    "scan": (lambda x: lax.scan(lambda x, _: (PSUM(x), None), x, length=5)[0], 5),
    "two scans": (
        lambda x: lax.scan(lambda x, _: (lax.fori_loop(0, 3, lambda _, x: PSUM(x), x), None), x, length=5)[0],
        15,
    ),
    "while": (in_a_while_loop(PSUM), 1),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, PSUM, jnp.sin, x), 1),
    "remat": (jax.checkpoint(PSUM), 1),
    "custom_vjp": (with_a_vjp(PSUM), 1),
    "custom_jvp": (with_a_jvp(PSUM), 1),
    "vmap": (jax.vmap(PSUM), 1),
    "an array of each": (lambda x: PSUM((x, x)), 2),
    "not": (jnp.sin, 0),
    "a mapped axis": (jax.vmap(lambda x: lax.psum(x, "mapped"), axis_name="mapped"), 0),
    "the place": (lambda x: x * lax.axis_index("data").astype(x.dtype), 0),
}


@pytest.mark.parametrize("place", NESTED)
def test_each_place(place):
    function, count = NESTED[place]
    name, _, devices, wire_bytes = SENT
    assert in_short(sent(sharded(function), X)) == ([(name, count, devices, count * wire_bytes)] if count else [])


def test_a_shard_map_in_another_has_the_axes_of_both():
    def local(x):
        return lax.psum(lax.pcast(x, "tensor", to="varying"), ("data", "tensor"))

    def outer(x):
        inner = jax.shard_map(local, in_specs=P(), out_specs=P(), axis_names={"tensor"})
        return inner(lax.pcast(x, "data", to="varying"))

    both = jax.shard_map(outer, mesh=mesh(), in_specs=P(), out_specs=P(), axis_names={"data"})
    assert in_short(sent(both, X)) == [KINDS["psum over two axes"][1]]


@jax.custom_vjp
def gather(x):
    return gathered(x)


gather.defvjp(
    lambda x: (gathered(x), None), lambda _, dy: (lax.psum_scatter(dy.astype(jnp.float32), "tensor", tiled=True),)
)


def test_a_custom_gradient_is_listed_once_in_the_forward_and_with_its_backward_when_differentiated():
    """A forward holds the function and, for whoever differentiates it, two more; only the first runs."""
    x = jnp.ones((64, 64))
    function = sharded(lambda x: lax.psum(jnp.sum(gather(x)), ("data", "tensor")))
    scalar, gathering = ("psum", 1, 8, 2 * 4 * 7 // 8), ("all_gather", 1, 4, 4 * AREA * 3)
    assert in_short(sent(function, x)) == [gathering, scalar]
    names = [each.name for each in sent(jax.grad(function), x)]
    assert names.count("all_gather") == names.count("psum_scatter") == 1


def test_with_its_defaults_a_shard_map_sums_the_gradients_of_what_is_the_same_everywhere():
    def loss(w, x):
        return lax.pmean(jnp.sum((x @ w) ** 2), ("data", "tensor"))

    split = jax.shard_map(loss, mesh=mesh(), in_specs=(P(), P(("data", "tensor"))), out_specs=P())
    collectives = sent(jax.grad(split), jnp.ones((64, 32)), jnp.ones((64, 64)))
    assert [(each.name, each.shape) for each in collectives] == [("psum", ()), ("psum", (64, 32))]


def test_inside_a_shard_map_its_axes_are_known():
    seen = []

    def function(x):
        seen.extend(written(jax.make_jaxpr(PSUM)(x).jaxpr))
        return x

    jax.make_jaxpr(sharded(function))(X)
    assert in_short(seen) == [SENT]


def test_what_depends_on_the_platform_is_as_on_cuda():
    def function(x):
        return lax.platform_dependent(x, cpu=jnp.sin, cuda=PSUM, default=KINDS["pmax"][0])

    assert in_short(sent(sharded(function), X)) == [SENT]


def collective(**fields):
    return WrittenCollective(
        **{"name": "psum", "dtype": "bfloat16", "shape": (64, 64), "axes": ("data",), "devices": 2}
        | {"count": 1, "bytes_each": 2**19}
        | fields
    )


def test_a_table_has_a_row_for_equal_ones():
    collectives = [collective(), collective(shape=(32,)), collective(count=3), collective(axes=("data", "tensor"))]
    assert table(collectives) == [
        "over the wire, a device sends 3.00 MiB a call:",
        "         array     dtype     axes          devices  MiB sent",
        "x4 psum  (64, 64)  bfloat16  data          2        2.00",
        "x1 psum  (32)      bfloat16  data          2        0.50",
        "x1 psum  (64, 64)  bfloat16  data, tensor  2        0.50",
    ]
    assert table([]) == []
