"""The part of a param that a device has, and the spec that says so."""

import pytest
from hybrid import make_mesh
from jax.sharding import PartitionSpec as P

from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.param_place import ParamPlace

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("place", "spec", "in_layer"),
    [
        (ParamPlace((8, 12)), P(), (8, 12)),
        (ParamPlace((8, 12), -1, -2), P("fsdp", "tensor"), (8, 6)),
        (ParamPlace((8, 12), -2, -2), P(("tensor", "fsdp")), (4, 12)),
        (ParamPlace((8, 12), -2, -2, storage=("fsdp", "pipe")), P(("tensor", "fsdp", "pipe")), (4, 12)),
        (ParamPlace((4, 8, 12), None, -2, expert_dim=-3), P("expert", "fsdp"), (2, 8, 12)),
        (ParamPlace((3, 4, 8, 12), None, -1, expert_dim=-3), P(None, "expert", None, "fsdp"), (3, 2, 8, 12)),
    ],
)
def test_spec_and_shape(place, spec, in_layer):
    assert place.spec == spec
    assert place.shape_in_layer(Parallelism(make_mesh(fsdp=2, expert=2, tensor=2))) == in_layer
