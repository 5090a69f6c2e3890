"""The collectives of jax.lax are known by the names that jax gives their primitives, in a mesh with its types and
without.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_fp8.jaxprs.collectives import COLLECTIVES, axes_of
from jax_fp8.jaxprs.equations import all_equations

pytestmark = pytest.mark.versions

MESH = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
X = jnp.ones((8, 8))
OF_LAX = {
    "psum": lambda x: lax.psum(x, "tensor"),
    "pmax": lambda x: lax.pmax(x, "tensor"),
    "pmin": lambda x: lax.pmin(x, "tensor"),
    "all_gather": lambda x: lax.all_gather(x, "tensor"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "tensor", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, ("tensor",), 0),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(x, x, *[jnp.arange(2)] * 4, axis_name="tensor"),
}


def found_in(function, *args, **options):
    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(("data", "tensor")), out_specs=P(), **options)
    equations = [equation for equation, _ in all_equations(jax.make_jaxpr(mapped)(*args).jaxpr)]
    return [(COLLECTIVES[of.primitive.name], axes_of(of)) for of in equations if of.primitive.name in COLLECTIVES]


@pytest.mark.parametrize("name", OF_LAX)
def test_each_by_its_name(name):
    assert found_in(OF_LAX[name], X, check_vma=False) == [(name, ("tensor",))]
    assert set(OF_LAX) == set(COLLECTIVES.values())


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "all_gather"])
def test_where_jax_knows_what_varies(name):
    """There a sum is another primitive."""

    def function(x):
        y = OF_LAX[name](x)
        return lax.pmax(jnp.sum(y), ("data", "tensor") if name == "all_gather" else "data")

    assert (name, ("tensor",)) in found_in(function, X)


def test_other_operations_are_none():
    assert not found_in(lambda x: x * lax.axis_index("tensor"), X, check_vma=False)
    assert found_in(lambda x: lax.psum(x, ("data", "tensor")), X, check_vma=False) == [("psum", ("data", "tensor"))]
