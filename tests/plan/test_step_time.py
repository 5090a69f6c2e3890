"""An estimate of a step's time, from HLO written here: kernels, what runs beside them, and what is waited for."""

import dataclasses

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_fp8.inspect.hlo import BRANCHES, read_hlo
from jax_fp8.plan.rates import BY_TILE, Rates
from jax_fp8.plan.step_time import estimate, longest

# One operation, one byte a second: times are what is counted.
SLOW, FAST = ((1.0, 1.0),), ((1.0, 1e30),)
ONE = Rates(
    fp8=SLOW,
    fp8_split=SLOW,
    bf16=SLOW,
    attention=SLOW,
    attention_fp8=((1.0, 2.0),),
    memory=1e30,
    wire=1.0,
    between_hosts=0.25,
    collective=0.0,
    launch=0.0,
    beside=0.0,
)
BYTES = dataclasses.replace(ONE, fp8=FAST, fp8_split=FAST, bf16=FAST, attention=FAST, attention_fp8=FAST, memory=1.0)
GEMM = '(bf16[8,4]{1,0}, u8[64]{0}) custom-call(%a, %b, %s, %s), custom_call_target="jax_fp8_gemm"'


def time_of(body: str, rates: Rates = ONE, others: str = "", taken=longest, host: int = 8):
    text = f"""HloModule step, is_scheduled=true, num_partitions=4

{others}
ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %a = f8e4m3fn[8,16]{{1,0}} parameter(1)
  %b = f8e4m3fn[4,16]{{1,0}} parameter(2)
  %s = f32[] parameter(3)
{body}
}}
"""
    return estimate(read_hlo(text), rates, taken, host)


def test_a_product_takes_its_operations_or_its_bytes():
    body = f"  %d = {GEMM}"
    assert time_of(body).seconds == 2 * 8 * 4 * 16
    assert time_of(body, BYTES).seconds == 8 * 16 + 4 * 16 + 2 * 4 + 2 * 8 * 4  # the workspace is none of them
    launch = dataclasses.replace(ONE, launch=0.5)
    assert time_of(body, launch).seconds == 2 * 8 * 4 * 16 + 0.5


def test_the_rate_of_a_product_is_that_of_its_size_and_accumulation():
    body = f"  %d = {GEMM}"
    sizes = dataclasses.replace(ONE, fp8=((256.0, 1.0), (4096.0, 5.0)))
    assert time_of(body, sizes).seconds == pytest.approx(1024 / 3)  # half way, by the logarithm
    split = dataclasses.replace(ONE, fp8_split=((1.0, 4.0),))
    for is_fast, seconds in (("true", 1024), ("false", 1024 / 4)):
        config = f"{body}, backend_config={{alpha = 1.0 : f32, fast_accumulation = {is_fast}, has_c = false}}"
        assert time_of(config, split).seconds == seconds


def test_products_by_tile_are_slower_than_those_with_split_accumulation():
    seconds = {}
    for scaling in ("", *BY_TILE):
        config = f'  %d = {GEMM}, backend_config={{fast_accumulation = false, has_c = false, scaling = "{scaling}"}}'
        seconds[scaling] = time_of(config, dataclasses.replace(ONE, fp8=FAST)).seconds
    assert seconds.pop("") == 1024
    assert seconds == {scaling: pytest.approx(1024 / factor) for scaling, factor in BY_TILE.items()}


def test_columns_that_a_product_leaves_out_do_not_count():
    some = '  %d = (bf16[8,2]{1,0}, u8[64]{0}) custom-call(%a, %b, %s, %s), custom_call_target="jax_fp8_gemm"'
    assert time_of(some).seconds == 2 * 8 * 2 * 16


@pytest.mark.parametrize("target", ["__cublas$lt$matmul", "jax_fp8_weight_gradient"])
def test_a_product_in_bfloat16_in_any_layout(target):
    """2 m n k, whichever of its dims an operand has first."""
    for a, b in (("[8,16]", "[16,4]"), ("[16,8]", "[16,4]"), ("[8,16]", "[4,16]")):
        body = f"""  %p = bf16{a}{{1,0}} parameter(4)
  %q = bf16{b}{{1,0}} parameter(5)
  %d = (f32[8,4]{{1,0}}, s8[64]{{0}}) custom-call(%p, %q), custom_call_target="{target}"
"""
        assert time_of(body, dataclasses.replace(ONE, fp8=FAST)).seconds == pytest.approx(2 * 8 * 4 * 16)


@pytest.mark.parametrize(("dtype", "named", "rate"), [("bf16", "", 1.0), ("f8e4m3fn", "F8", 2.0)])
def test_attention_is_causal(dtype, named, rate):
    shapes = f"{dtype}[2,32,4,8]{{3,2,1,0}}"
    body = f"""  %q = {shapes} parameter(4)
  %o = ({shapes}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax{named}"
  %g = ({shapes}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward{named}" """
    assert time_of(body).seconds == (2 + 5) * 2 * (2 * 4) * 32 * 32 * 8 / 2 / rate
    by_tokens = dataclasses.replace(
        ONE, **{name: ((8.0, 4.0), (32.0, rate)) for name in ("attention", "attention_fp8")}
    )
    assert time_of(body, by_tokens).seconds == time_of(body).seconds


SUM = "all-reduce{}(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add"
SUM_SECONDS = 2 * 3 * 64 / 4  # on a ring of four


@pytest.mark.parametrize(("products", "exposed"), [(0, SUM_SECONDS), (1, 0.0)])
def test_a_collective_beside_a_product(products, exposed):
    beside = "\n".join(f"  %d.{i} = {GEMM}" for i in range(products))
    start = f"  %r = f32[16]{{0}} {SUM.format('-start')}"
    found = time_of(f"{start}\n{beside}\n  %e = f32[16]{{0}} all-reduce-done(%r)")
    assert found.collectives == SUM_SECONDS and found.exposed == exposed
    assert found.seconds == found.kernels + exposed
    slow = dataclasses.replace(ONE, beside=0.5)
    found = time_of(f"{start}\n{beside}\n  %e = f32[16]{{0}} all-reduce-done(%r)", slow)
    assert found.slowed == 0.5 * (SUM_SECONDS - exposed)


def test_collectives_run_one_after_another():
    two = "\n".join(f"  %r.{i} = f32[16]{{0}} {SUM.format('-start')}" for i in range(2))
    done = "\n".join(f"  %e.{i} = f32[16]{{0}} all-reduce-done(%r.{i})" for i in range(2))
    assert time_of(f"{two}\n{done}").exposed == 2 * SUM_SECONDS
    synchronous = f"  %r = f32[16]{{0}} {SUM.format('')}\n  %d = {GEMM}"
    assert time_of(synchronous).exposed == SUM_SECONDS


def test_one_that_is_wrapped_is_found():
    others = """%wrapped (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  %inside = f32[16]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
    body = """  %y = f32[64]{0} parameter(4)
  %r = ((f32[64]{0}), f32[16]{0}) async-start(%y), calls=%wrapped
  %e = f32[16]{0} async-done(%r)"""
    assert time_of(body, others=others).exposed == 3 * 256 / 4


LOOP = """%body (p: (f32[16])) -> (f32[16]) {{
  %p = (f32[16]{{0}}) parameter(0)
  %a.1 = f8e4m3fn[8,16]{{1,0}} parameter(1)
  %b.1 = f8e4m3fn[4,16]{{1,0}} parameter(2)
  %s.1 = f32[] parameter(3)
  %d.1 = {gemm}
}}

%other (p: (f32[16])) -> (f32[16]) {{
  %p.2 = (f32[16]{{0}}) parameter(0)
}}
""".format(gemm=GEMM.replace("%a, %b, %s, %s", "%a.1, %b.1, %s.1, %s.1"))


def test_loops_and_branches():
    loop = '  %w = (f32[16]{0}) while(%x), body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    assert time_of(loop, others=LOOP).seconds == 3 * 1024
    branch = "  %c = (f32[16]{0}) conditional(%s, %x, %x), branch_computations={%other, %body}"
    assert time_of(branch, others=LOOP).seconds == 1024


def test_a_loop_of_one_trip_and_of_none():
    for trips in (0, 1, 2):
        loop = f'  %w = (f32[16]{{0}}) while(%x), body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
        assert time_of(loop, others=LOOP).seconds == trips * 1024


def test_what_is_under_way_before_a_loop_is_hidden_once():
    """Of 200 seconds, by trips of 128."""
    loop = '  %w = (f32[16]{0}) while(%x), body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    body = LOOP.replace("f8e4m3fn[8,16]", "f8e4m3fn[1,16]").replace("bf16[8,4]", "bf16[1,4]")
    start = f"  %r = f32[16]{{0}} {SUM.format('-start')}\n{loop}\n  %e = f32[16]{{0}} all-reduce-done(%r)"
    slow = dataclasses.replace(ONE, beside=1.0, wire=2 * 3 * 64 / 4 / 200)
    found = time_of(start, slow, body)
    assert found.kernels == 4 * 128 and found.exposed == 0 and found.slowed == found.collectives == 200


BRANCH = "  %c = (f32[16]{0}) conditional(%s, %x, %x), branch_computations={%other, %body}"


@pytest.mark.parametrize(
    ("counts", "seconds"), [((0, 1), 1024), ((1, 0), 0), ((3, 1), 256), ((0.5, 0.5), 512), (None, 1024)]
)
def test_a_conditional_takes_its_branches_as_often_as_they_run(counts, seconds):
    assert time_of(BRANCH, others=LOOP, taken=lambda conditional: counts).seconds == seconds
    in_loop = LOOP + "%ticks (p.9: (f32[16])) -> (f32[16]) {\n  %p.9 = (f32[16]{0}) parameter(0)\n"
    in_loop += (
        "  %s.9 = f32[] parameter(1)\n" + BRANCH.replace("%c", "%c.9").replace("%s, %x, %x", "%s.9, %p.9") + "\n}\n"
    )
    loop = '  %w = (f32[16]{0}) while(%x), body=%ticks, backend_config={"known_trip_count":{"n":"7"}}'
    assert time_of(loop, others=in_loop, taken=lambda conditional: counts).seconds == 7 * seconds


def test_a_collective_in_a_branch_counts_as_often():
    with_sum = LOOP.replace(
        "%p.2 = ", f"%x.2 = f32[16]{{0}} parameter(1)\n  %r.2 = f32[16]{{0}} {SUM.format('')}\n  %p.2 = "
    )
    with_sum = with_sum.replace("all-reduce(%x)", "all-reduce(%x.2)")
    found = time_of(BRANCH, others=with_sum, taken=lambda conditional: (1, 3))
    assert found.wire_bytes == SUM_SECONDS / 4 == found.exposed and found.kernels == 3 / 4 * 1024


@pytest.mark.parametrize("counts", [(1,), (1, 2, 3), (0, 0), (-1, 2)])
def test_counts_that_are_not_those_of_the_branches_are_refused(counts):
    with pytest.raises(ValueError, match=r"taken must give 2 numbers for the branches of %c, none below 0"):
        time_of(BRANCH, others=LOOP, taken=lambda conditional: counts)


@pytest.mark.parametrize(
    ("groups", "host", "rate"),
    [
        ("{{0,1,2,3}}", 4, 1.0),
        ("{{0,1,2,3}}", 2, 0.5),  # two devices of each host send to the next
        ("{{0,1,2,3}}", 1, 0.25),
        ("{{0,1},{2,3}}", 2, 1.0),
    ],
)
def test_a_collective_between_hosts_takes_the_rate_of_the_network(groups, host, rate):
    body = f"  %r = f32[16]{{0}} {SUM.format('').replace('{{0,1,2,3}}', groups)}"
    devices = len(groups.split("},{")[0].split(","))
    sent = 2 * (devices - 1) * 64 / devices
    found = time_of(body, host=host)
    assert found.exposed == sent / rate and found.wire_bytes == sent
    assert found.host_bytes == (0 if rate == 1.0 else sent)


def test_a_shift_between_hosts_has_one_sender_a_pair():
    shift = "  %r = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3}}"
    assert [time_of(shift, host=host).exposed for host in (4, 2)] == [64, 64 / 0.25]


@pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))
def test_a_compiled_pipeline_takes_its_ticks_and_the_units_that_run_in_them():
    """A loop over 7 ticks, in each of which a conditional runs nothing, one product, or three; then a shift."""
    mesh, size = h200.mesh(pipe=4), 1024

    def unit(products):
        def run(x, w):
            for _ in range(products):
                x = (x @ w).astype(x.dtype)
            return x

        return run

    def tick(x, named):
        x = lax.switch(named[0], [unit(0), unit(1), unit(3)], x, jnp.ones((size, size), x.dtype))
        return lax.ppermute(x, "pipe", [(0, 1), (1, 2), (2, 3)]), None

    def ticks(units, x):
        return lax.scan(tick, x, units)[0]

    specs = P(None, "pipe"), P("pipe")
    ticks = jax.jit(jax.shard_map(ticks, mesh=mesh, in_specs=specs, out_specs=P("pipe"), check_vma=False))
    shapes = jax.ShapeDtypeStruct((7, 4), jnp.int32), jax.ShapeDtypeStruct((4 * size, size), jnp.bfloat16)
    placed = [h200.shapes(shape, h200.on_mesh(mesh, *spec)) for shape, spec in zip(shapes, specs, strict=True)]
    module = read_hlo(h200.compile(ticks, *placed).hlo)
    product = 2 * size**3
    shifts = 7 * 2 * size**2

    def kernels(counts):
        found = estimate(module, ONE, lambda conditional: counts)
        assert found.wire_bytes == shifts
        return found.kernels

    for counts, products in ((1, 0, 0), 0), ((0, 1, 0), 7), ((0, 0, 1), 21), (None, 21), ((2, 4, 1), 4 + 3):
        assert kernels(counts) == pytest.approx(products * product, abs=1e-9)
    (conditional,) = [instruction for instruction in module if instruction.opcode in BRANCHES]
    assert "/cond" in conditional.op_name and len(conditional.calls) == 3


FUSIONS = """%cut (p: f32[1000], i: s32[]) -> f32[10] {
  %p.3 = f32[1000]{0} parameter(0)
  %i = s32[] parameter(1)
  %c = f32[10]{0} dynamic-slice(%p.3, %i)
}

%paste (p: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {
  %p.4 = f32[1000]{0} parameter(0)
  %u = f32[10]{0} parameter(1)
  %i.1 = s32[] parameter(2)
  %r.4 = f32[1000]{0} dynamic-update-slice(%p.4, %u, %i.1)
}

%whole (p: f32[1000]) -> f32[1000] {
  %p.5 = f32[1000]{0} parameter(0)
  %n = f32[1000]{0} negate(%p.5)
}
"""


@pytest.mark.parametrize(
    ("called", "result", "operands", "bytes_"),
    [
        ("cut", "f32[10]", "%y, %j", 4 + 2 * 40),
        ("paste", "f32[1000]", "%y, %z, %j", 4 + 2 * 40),
        ("whole", "f32[1000]", "%y", 2 * 4000),
    ],
)
def test_a_fusion_reads_and_writes_what_it_needs(called, result, operands, bytes_):
    body = f"""  %y = f32[1000]{{0}} parameter(4)
  %z = f32[10]{{0}} parameter(5)
  %j = s32[] parameter(6)
  %f = {result}{{0}} fusion({operands}), kind=kLoop, calls=%{called}"""
    assert time_of(body, BYTES, FUSIONS).seconds == bytes_


def test_it_says_what_it_found():
    text = str(time_of(f"  %d = {GEMM}", dataclasses.replace(BYTES, memory=1e30, launch=1e-3)))
    assert text == "1.0 ms a step: 1.0 ms kernels, 0.0 ms exposed, 0.0 ms slowed, 0.0 ms collectives"
