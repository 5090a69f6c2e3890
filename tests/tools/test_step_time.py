"""An estimate of a step's time, from HLO written here: kernels, what runs beside them, and what is waited for."""

import dataclasses

import pytest

from jax_fp8.tools.hlo import read_hlo
from jax_fp8.tools.step_time import H200, Rates, estimate

# One operation, one byte a second: times are what is counted.
ONE = Rates(fp8=1.0, bf16=1.0, attention=1.0, memory=1e30, wire=1.0, collective=0.0, launch=0.0, beside=0.0)
BYTES = dataclasses.replace(ONE, fp8=1e30, bf16=1e30, attention=1e30, memory=1.0)
GEMM = '(bf16[8,4]{1,0}, u8[64]{0}) custom-call(%a, %b, %s, %s), custom_call_target="jax_fp8_gemm"'


def time_of(body: str, rates: Rates = ONE, others: str = ""):
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
    return estimate(read_hlo(text), rates)


def test_a_product_takes_its_operations_or_its_bytes():
    body = f"  %d = {GEMM}"
    assert time_of(body).seconds == 2 * 8 * 4 * 16
    assert time_of(body, BYTES).seconds == 8 * 16 + 4 * 16 + 2 * 4 + 2 * 8 * 4  # the workspace is none of them
    launch = dataclasses.replace(ONE, launch=0.5)
    assert time_of(body, launch).seconds == 2 * 8 * 4 * 16 + 0.5


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
        assert time_of(body, dataclasses.replace(ONE, fp8=1e30)).seconds == pytest.approx(2 * 8 * 4 * 16)


def test_attention_is_causal():
    shapes = "bf16[2,32,4,8]{3,2,1,0}"
    body = f"""  %q = {shapes} parameter(4)
  %o = ({shapes}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %g = ({shapes}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward" """
    assert time_of(body).seconds == (2 + 5) * 2 * (2 * 4) * 32 * 32 * 8 / 2


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
    text = str(time_of(f"  %d = {GEMM}", dataclasses.replace(H200, launch=1e-3)))
    assert text == "1.0 ms a step: 1.0 ms kernels, 0.0 ms exposed, 0.0 ms slowed, 0.0 ms collectives"
