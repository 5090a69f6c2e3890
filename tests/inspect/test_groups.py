"""The groups of collectives in every spelling of HLO, the hosts they are on, and what the compiler writes of a mesh."""

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_fp8.inspect.groups import groups_of, on_hosts
from jax_fp8.inspect.hlo import read_hlo

needs_compiler = pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))
ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={{0},{1,2,3}}", ((0,), (1, 2, 3))),
        ("replica_groups={}", (ALL,)),
        ("channel_id=1", (ALL,)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[1,8]<=[8]", (ALL,)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}", (ALL,)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2,'b'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh[a=2,b=4] {b}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,1},{1,2},{2,3}}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,0},{1,1}}", ((0,), (1,))),
    ],
)
def test_groups_in_every_spelling(attributes, groups):
    assert groups_of(f" {attributes}, a={{9,9}}, metadata={{}}", 8) == groups


@pytest.mark.parametrize(
    ("groups", "hosts"),
    [
        (((0, 1), (2, 3)), (1, 2)),
        (((3, 4), (6, 7)), (2, 1)),
        ((ALL,), (2, 4)),
        (((0, 1, 2, 3, 4),), (2, 1)),
        (((0, 1), (0, 4, 8)), (3, 1)),
        ((), (1, 1)),
    ],
)
def test_the_hosts_of_groups(groups, hosts):
    """Of four devices each."""
    assert on_hosts(groups, per_host=4) == hosts


@needs_compiler
def test_what_the_compiler_writes_of_a_mesh_on_two_hosts():
    """16 devices: `tensor` is on one host, `data` joins both, and a shift along it has pairs within and across."""
    mesh = h200.mesh(data=4, tensor=4)

    def exchange(x):
        x = lax.psum(x, "tensor") * x
        x = lax.all_gather(x, "data") * 2
        return lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)])

    over = jax.jit(
        jax.shard_map(exchange, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", None, "tensor"))
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=h200.on_mesh(mesh, "data", "tensor"))
    found = {i.collective: i.groups for i in read_hlo(h200.compile(over, x).hlo) if i.collective}
    rows = tuple(tuple(range(first, first + 4)) for first in (0, 4, 8, 12))
    columns = tuple(zip(*rows, strict=True))
    assert found == {"all-reduce": rows, "all-gather": columns, "collective-permute": columns}
    hosts = {kind: on_hosts(groups, per_host=8) for kind, groups in found.items()}
    assert hosts == {"all-reduce": (1, 4), "all-gather": (2, 2), "collective-permute": (2, 2)}
