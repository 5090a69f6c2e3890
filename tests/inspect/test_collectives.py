"""What goes over the wire in a compiled program: read off a module written by hand, and off real ones whose bytes are
known, for CPU devices and for H200s.
"""

import functools

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.inspect.capture import capture_report
from jax_fp8.inspect.collectives import Collective, collectives_of, ring_bytes, table
from jax_fp8.inspect.hlo import Array, read_hlo

needs_compiler = pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))

# Four devices. An all-gather beside a GEMM, two kernels and another collective; a collective in a wrapped computation,
# beside a loop; a reduce-scatter with nothing in between; an exposed all-reduce in a loop of 5; one in a branch.
MODULE = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%body (b: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %b = (s32[], bf16[64,64]{1,0}) parameter(0)
  %carried = bf16[64,64]{1,0} get-tuple-element(%b), index=1
  %all-reduce.1 = bf16[64,64]{1,0} all-reduce(%carried), channel_id=1, replica_groups={}, to_apply=%add
  %gemm.1 = bf16[64,64]{1,0} custom-call(%all-reduce.1), custom_call_target="jax_fp8_gemm"
  ROOT %next = (s32[], bf16[64,64]{1,0}) tuple(%b, %gemm.1)
}

%condition (c: (s32[], bf16[64,64])) -> pred[] {
  %c = (s32[], bf16[64,64]{1,0}) parameter(0)
  ROOT %less = pred[] fusion(%c), kind=kLoop, calls=%compared
}

%compared (l: (s32[], bf16[64,64])) -> pred[] {
  %l = (s32[], bf16[64,64]{1,0}) parameter(0)
  ROOT %lt = pred[] compare(%l, %l), direction=LT
}

%taken (t: bf16[64,64]) -> bf16[64,64] {
  %t = bf16[64,64]{1,0} parameter(0)
  ROOT %permuted = bf16[64,64]{1,0} collective-permute(%t), channel_id=2, source_target_pairs={{0,1},{1,0}}
}

%kept (k: bf16[64,64]) -> bf16[64,64] {
  ROOT %k = bf16[64,64]{1,0} parameter(0)
}

%wrapped (w: f8e5m2[64,64]) -> f8e5m2[64,64] {
  %w = f8e5m2[64,64]{1,0} parameter(0)
  ROOT %exchanged = f8e5m2[64,64]{1,0} all-to-all(%w), channel_id=3, replica_groups=[2,2]<=[4], dimensions={0}
}

%fused_dot (d: bf16[64,64]) -> bf16[64,64] {
  %d = bf16[64,64]{1,0} parameter(0)
  ROOT %dot.1 = bf16[64,64]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (q: f8e4m3fn[64,64], x: bf16[64,64], e: f8e5m2[64,64], flag: pred[]) -> bf16[64,64] {
  %q = f8e4m3fn[64,64]{1,0} parameter(0)
  %x = bf16[64,64]{1,0} parameter(1)
  %e = f8e5m2[64,64]{1,0} parameter(2)
  %flag = pred[] parameter(3)
  %all-gather-start.1 = ((f8e4m3fn[64,64]{1,0}, bf16[64,64]{1,0}), (f8e4m3fn[128,64]{1,0}, bf16[128,64]{1,0})) \
all-gather-start(%q, %x), channel_id=4, replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}, dimensions={0}
  %view = bf16[4096]{0} bitcast(%x)
  %fusion.1 = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%fused_dot
  %copy.1 = bf16[64,64]{1,0} copy(%x)
  %all-reduce.2 = f32[] all-reduce(%flag), channel_id=5, replica_groups={{0,1,2,3}}, to_apply=%add
  %all-gather-done.1 = (f8e4m3fn[128,64]{1,0}, bf16[128,64]{1,0}) all-gather-done(%all-gather-start.1)
  %async-start.1 = ((f8e5m2[64,64]{1,0}), f8e5m2[64,64]{1,0}) async-start(%e), calls=%wrapped
  %async-update.1 = ((f8e5m2[64,64]{1,0}), f8e5m2[64,64]{1,0}) async-update(%async-start.1)
  %first = (s32[], bf16[64,64]{1,0}) tuple(%flag, %x)
  %while.1 = (s32[], bf16[64,64]{1,0}) while(%first), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %async-done.1 = f8e5m2[64,64]{1,0} async-done(%async-update.1)
  %reduce-scatter-start.1 = ((bf16[64,64]{1,0}), bf16[16,64]{1,0}) reduce-scatter-start(%x), channel_id=6, \
replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
  %reduce-scatter-done.1 = bf16[16,64]{1,0} reduce-scatter-done(%reduce-scatter-start.1)
  %fusion.2 = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%fused_dot
  ROOT %conditional.1 = bf16[64,64]{1,0} conditional(%flag, %x, %x), true_computation=%taken, false_computation=%kept
}
"""
AREA = 64 * 64


@functools.cache
def of_module() -> dict[str, list[Collective]]:
    found: dict[str, list[Collective]] = {}
    for collective in collectives_of(read_hlo(MODULE)):
        found.setdefault(collective.kind, []).append(collective)
    return found


def test_a_pair_is_beside_what_stands_between():
    (gather,) = of_module()["all-gather"]
    assert (gather.launches, gather.products) == (2, 1)  # the dot and the copy; not the bitcast, not the all-reduce
    assert gather.hidden and (gather.devices, gather.times) == (2, 1)
    assert [str(array) for array in gather.arrays] == ["f8e4m3fn[128,64]", "bf16[128,64]"]
    assert gather.dtypes == ("bf16", "f8e4m3fn")
    assert (gather.wire_bytes_of("f8e4m3fn"), gather.wire_bytes_of("bf16")) == (AREA, 2 * AREA)


def test_a_wrapped_collective_is_beside_what_its_wrapper_is_beside():
    (exchange,) = of_module()["all-to-all"]
    assert (exchange.devices, exchange.wire_bytes) == (2, AREA // 2)
    assert (exchange.launches, exchange.products) == (10, 5)  # five times a product and a comparison


def test_a_pair_with_nothing_in_between_is_exposed():
    (scatter,) = of_module()["reduce-scatter"]
    assert not scatter.hidden and (scatter.devices, scatter.wire_bytes) == (4, 2 * AREA * 3 // 4)


def test_a_loop_multiplies_and_without_groups_all_devices_take_part():
    in_loop, scalar = sorted(of_module()["all-reduce"], key=lambda reduction: -reduction.times)
    assert (in_loop.times, in_loop.devices, in_loop.wire_bytes) == (5, 4, 5 * 2 * 2 * AREA * 3 // 4)
    assert not in_loop.hidden and not scalar.hidden  # there is no pair


def test_a_branch_is_told_apart():
    (permute,) = of_module()["collective-permute"]
    assert permute.in_branch and (permute.devices, permute.wire_bytes) == (2, 2 * AREA)
    assert not any(other.in_branch for kind, found in of_module().items() if kind != permute.kind for other in found)


def test_a_start_without_a_done_is_beside_all_that_follows():
    without = "\n".join(line for line in MODULE.splitlines() if "all-gather-done" not in line)
    (gather,) = (found for found in collectives_of(read_hlo(without)) if found.kind == "all-gather")
    assert (gather.launches, gather.products) == (2 + 5 * 2 + 1, 1 + 5 + 1)


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [
        ("all-reduce", 4, 1500),
        ("all-reduce", 1, 0),
        ("all-gather", 4, 750),
        ("reduce-scatter", 2, 500),
        ("all-to-all", 8, 875),
        ("all-to-all", 3, 667),  # the last piece is not whole
        ("collective-permute", 4, 1000),
        ("collective-permute", 1, 0),
    ],
)
def test_bytes_on_a_ring(kind, devices, expected):
    assert ring_bytes(kind, 1000, devices) == expected


MIB = Array("bf16", (512, 1024))


def test_a_table_has_a_row_for_each_kind_dtype_and_group():
    gather = Collective("all-gather", (MIB, Array("f8e4m3fn", (1024, 1024))), 2, 3, 0, 0, False)
    beside = [Collective("all-gather", (MIB,), 2, 1, kernels, kernels // 2, False) for kernels in (1, 2)]
    in_branch = Collective("all-gather", (MIB,), 2, 1, 0, 0, True)
    assert table([gather, *beside, in_branch]) == [
        "                                              MiB a step  beside products  beside other kernels  exposed",
        "5 all-gather bf16 of 2                              2.50             0.50                  0.50     1.50",
        "3 all-gather f8e4m3fn of 2                          1.50             0.00                  0.00     1.50",
        "1 all-gather bf16 of 2, in branches, at most        0.50             0.00                  0.00     0.50",
    ]
    assert table([]) == []


BF16, F8 = jnp.bfloat16, fp8.E4M3
SENDING = {
    "psum": lambda x, q: lax.psum(x, "data"),
    "all_gather": lambda x, q: lax.all_gather(q, "tensor", tiled=True),
    "psum_scatter": lambda x, q: lax.psum_scatter(x, ("data", "tensor"), tiled=True),
    "all_to_all": lambda x, q: lax.all_to_all(q, "tensor", 0, 1, tiled=True),
    "ppermute": lambda x, q: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
}
SENT = {
    "psum": (("all-reduce", "bf16"), 2 * 2 * AREA * 1 // 2),
    "all_gather": (("all-gather", "f8e4m3fn"), 2 * AREA * 1 // 2),
    "psum_scatter": (("reduce-scatter", "bf16"), 2 * AREA * 3 // 4),
    "all_to_all": (("all-to-all", "f8e4m3fn"), AREA // 2),
    "ppermute": (("collective-permute", "bf16"), 2 * AREA),
}


def sharded(function, mesh):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def on(mesh, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=h200.on_mesh(mesh))


@needs_compiler
@pytest.mark.parametrize("left_out", [None, *SENDING])
def test_what_shards_send_is_what_is_compiled(left_out):
    mesh = h200.mesh(data=2, tensor=2)
    names = [name for name in SENDING if name != left_out]
    function = sharded(lambda x, q: [SENDING[name](x, q) for name in names], mesh)
    arguments = on(mesh, BF16, 64, 64), on(mesh, F8, 64, 64)
    counts, wire_bytes = h200.over_the_wire(function.lower(*arguments))
    assert counts == {SENT[name][0]: 1 for name in names}
    assert wire_bytes == sum(SENT[name][1] for name in names) == fp8.explain(function, *arguments).wire_bytes


@needs_compiler
@pytest.mark.parametrize("independent", [True, False], ids=["independent", "dependent"])
def test_an_all_gather_is_hidden_by_products_that_do_not_need_it(independent):
    mesh = h200.mesh(tensor=4)

    def gather_and_multiply(q, x, w):
        gathered = lax.all_gather(q, "tensor", tiled=True)
        start = x if independent else x + gathered[: x.shape[0]].astype(x.dtype)
        return jnp.cos(jnp.sin(start @ w) @ w) @ w, jnp.sin(gathered.astype(jnp.float32))

    matrix = on(mesh, BF16, 1024, 1024)
    report = capture_report(sharded(gather_and_multiply, mesh).lower(on(mesh, F8, 1024, 1024), matrix, matrix))
    (gather,) = report.collectives
    assert (gather.kind, gather.dtypes, gather.devices, gather.times) == ("all-gather", ("f8e4m3fn",), 4, 1)
    assert report.wire_bytes == gather.wire_bytes == 3 * 2**20
    assert (gather.products, gather.hidden) == ((3, True) if independent else (0, False))
    exposed = "0.00" if independent else "3.00"
    assert str(report).splitlines()[-1].split()[-1] == exposed


@needs_compiler
def test_a_loop_sends_as_often_as_it_runs():
    mesh = h200.mesh(data=2)

    def layers(x, stack):
        return lax.scan(lambda x, w: (lax.psum(jnp.sin(x @ w), "data"), None), x, stack)[0]

    program = h200.compile(sharded(layers, mesh), on(mesh, BF16, 64, 64), on(mesh, BF16, 7, 64, 64))
    assert h200.over_the_wire(program) == ({("all-reduce", "bf16"): 7}, 7 * 2 * AREA)


@pytest.mark.versions
def test_on_cpu_devices():
    """The text of every version of jax is read: groups have been written in several ways."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    x, q = jnp.ones((64, 64)), jnp.ones((64, 64), jnp.int8)
    send = {name: SENDING[name] for name in ("psum", "all_gather", "psum_scatter")}
    program = sharded(lambda x, q: [each(x, q) for each in send.values()], mesh)
    found = {each.kind: each for each in collectives_of(read_hlo(program.lower(x, q).compile().as_text()))}
    expected = {"all-reduce": (2, 4 * AREA), "all-gather": (4, 3 * AREA), "reduce-scatter": (8, 4 * AREA * 7 // 8)}
    assert {kind: (each.devices, each.wire_bytes) for kind, each in found.items()} == expected
