"""Reading the compiler's texts: loops, branches and fusions are followed,
and how often each runs is the product of its loops.
"""

from collections import Counter

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_fp8.inspect.hlo import BRANCHES, CALLS, FUSIONS, by_computation, executed, read_hlo, read_thunks

needs_compiler = pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))

# A loop of 4 around a loop of 3 whose kernel stands in a fusion, a loop of unknown length, and two conditionals,
# the second by index.
MODULE = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f8e4m3fn[8,16]{1,0}, pred[])->f8e4m3fn[8,16]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%sliced (p: f8e4m3fn[8,16]) -> (f8e4m3fn[8,16], f32[]) {
  %p = f8e4m3fn[8,16]{1,0} parameter(0)
  ROOT %call.1 = (f8e4m3fn[8,16]{1,0}, f32[]) custom-call(%p), custom_call_target="cast", \
metadata={op_name="jit(f)/cast_weights/ffi_call"}
}

%inner (x: (s32[], f8e4m3fn[8,16])) -> (s32[], f8e4m3fn[8,16]) {
  %x = (s32[], /*index=1*/f8e4m3fn[8,16]{1,0}) parameter(0)
  %part = f8e4m3fn[8,16]{1,0} get-tuple-element(%x), index=1
  %fusion.1 = (f8e4m3fn[8,16]{1,0}, f32[]) fusion(%part), kind=kCustom, calls=%sliced
  ROOT %tuple.1 = (s32[], f8e4m3fn[8,16]{1,0}) tuple(%x, %part)
}

%less (y: (s32[], f8e4m3fn[8,16])) -> pred[] {
  %y = (s32[], f8e4m3fn[8,16]{1,0}) parameter(0)
  ROOT %wrapped_compare = pred[] fusion(%y), kind=kLoop, calls=%comparison
}

%comparison (z: s32[]) -> pred[] {
  %z = s32[] parameter(0)
  ROOT %lt = pred[] compare(%z, %z), direction=LT
}

%outer.2 (o: (s32[], f8e4m3fn[8,16])) -> (s32[], f8e4m3fn[8,16]) {
  %o = (s32[], f8e4m3fn[8,16]{1,0}) parameter(0)
  %call.2 = f32[] custom-call(%o), custom_call_target="gemm"
  ROOT %while.1 = (s32[], f8e4m3fn[8,16]{1,0}) while(%o), condition=%less, body=%inner, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
}

%keep (k: f8e4m3fn[8,16]) -> f8e4m3fn[8,16] {
  ROOT %k = f8e4m3fn[8,16]{1,0} parameter(0)
}

%renew (r: f8e4m3fn[8,16]) -> f8e4m3fn[8,16] {
  %r = f8e4m3fn[8,16]{1,0} parameter(0)
  ROOT %copy.1 = f8e4m3fn[8,16]{1,0} copy(%r)
}

%asynchronous (q: f8e4m3fn[8,16]) -> f8e4m3fn[8,16] {
  %q = f8e4m3fn[8,16]{1,0} parameter(0)
  ROOT %call.3 = f8e4m3fn[8,16]{1,0} custom-call(%q), custom_call_target="move"
}

ENTRY %main.9 (w: f8e4m3fn[8,16], flag: pred[]) -> f8e4m3fn[8,16] {
  %w = f8e4m3fn[8,16]{1,0} parameter(0)
  %flag = pred[] parameter(1)
  %zero = s32[] constant(0)
  %copy.2 = s32[] copy(%zero)
  %start = (s32[], f8e4m3fn[8,16]{1,0}) tuple(%copy.2, %w)
  %while.2 = (s32[], f8e4m3fn[8,16]{1,0}) while(%start), condition=%less, body=%outer.2, \
metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"4"}}
  %while.3 = (s32[], f8e4m3fn[8,16]{1,0}) while(%while.2), condition=%less, body=%inner
  %cond.1 = f8e4m3fn[8,16]{1,0} conditional(%flag, %w, %w), true_computation=%renew, false_computation=%keep
  %cond.2 = f8e4m3fn[8,16]{1,0} conditional(%zero, %w, %w, %w), branch_computations={%keep, %renew, %inner}
  %async.1 = ((f8e4m3fn[8,16]{1,0}), f8e4m3fn[8,16]{1,0}) async-start(%w), calls=%asynchronous
  %async.2 = f8e4m3fn[8,16]{1,0} async-done(%async.1)
  ROOT %all-reduce-start.1 = f8e4m3fn[8,16]{1,0} all-reduce-start(%w), to_apply=%add
}
"""
INSTRUCTIONS = read_hlo(MODULE)


def runs(entering) -> Counter:
    """How often each custom call runs."""
    counts = Counter()
    for instruction, times in executed(by_computation(INSTRUCTIONS), "%main.9", entering):
        if instruction.target:
            counts[instruction.target] += times
    return counts


def of_opcode(opcode):
    return [instruction for instruction in INSTRUCTIONS if instruction.opcode == opcode]


def test_a_nested_loop_runs_the_product_of_its_trips():
    # The loop of unknown length runs its fusion once more.
    assert runs(CALLS | FUSIONS) == {"cast": 4 * 3 + 1, "gemm": 4, "move": 1}


@pytest.mark.parametrize(
    ("entering", "expected"),
    [
        (CALLS, {"gemm": 4, "move": 1}),
        (CALLS | FUSIONS | BRANCHES, {"cast": 4 * 3 + 1 + 1, "gemm": 4, "move": 1}),
        ((), {}),
    ],
    ids=["not into fusions", "into branches", "into nothing"],
)
def test_only_what_is_asked_for_is_entered(entering, expected):
    assert runs(entering) == expected


def test_branches_stand_in_the_order_of_their_index():
    assert [conditional.calls for conditional in of_opcode("conditional")] == [
        ("%keep", "%renew"),
        ("%keep", "%renew", "%inner"),
    ]


def test_trips_are_read_and_may_be_unknown():
    assert [loop.trips for loop in of_opcode("while")] == [3, 4, None]
    assert of_opcode("while")[0].calls == ("%less", "%inner")


def test_a_copied_constant_is_no_copy():
    from_branch, from_constant = of_opcode("copy")
    assert (from_branch.copies, from_constant.copies) == (True, False)
    assert (from_branch.computation, from_constant.computation) == ("%renew", "%main.9")
    assert str(from_branch) == "f8e4m3fn[8,16] = copy(f8e4m3fn[8,16])  # %renew"


def test_operands_are_looked_up():
    (fusion,) = [instruction for instruction in of_opcode("fusion") if instruction.calls == ("%sliced",)]
    assert [str(array) for array in fusion.operands] == ["f8e4m3fn[8,16]"]
    assert fusion.sources == ("get-tuple-element",)
    assert [array.bytes for array in fusion.results] == [128, 4]


def test_what_launches():
    entry = [instruction for instruction in INSTRUCTIONS if instruction.in_entry]
    assert [instruction.opcode for instruction in entry if instruction.launches] == ["copy", "all-reduce-start"]
    inner = by_computation(INSTRUCTIONS)["%inner"]
    assert [instruction.opcode for instruction in inner if instruction.launches] == ["fusion"]


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [("replica_groups={{0},{1,2,3}}", 3), ("channel_id=1", 8), ("source_target_pairs={{0,0},{1,1}}", 1)],
)
def test_devices_of_the_largest_group(attributes, devices):
    text = "HloModule m, replica_count=1, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
    text += (
        f"  %x = f32[8]{{0}} parameter(0)\n  ROOT %sent = f32[8]{{0}} all-gather-start(%x), {attributes}, a={{9,9}}\n}}"
    )
    x, sent = read_hlo(text)
    assert (sent.collective, sent.devices, sent.inputs) == ("all-gather", devices, ("%x",))
    assert (x.collective, x.devices) == ("", None)


@pytest.mark.parametrize(
    ("written", "asynchronous", "target"),
    [
        ("(f8e4m3fn[8,16]{1,0}, f32[]) fusion(%part)", "((f8e4m3fn[8,16]{1,0})) fusion-start(%part)", "cast"),
        ("async-start(%w), calls=%asynchronous", "call-start(%w), to_apply=%asynchronous", "move"),
    ],
    ids=["fusion", "call"],
)
def test_what_runs_asynchronously_is_entered(written, asynchronous, target):
    assert written in MODULE
    computations = by_computation(read_hlo(MODULE.replace(written, asynchronous)))
    found = executed(computations, "%main.9", CALLS | FUSIONS)
    expected = runs(CALLS | FUSIONS)[target]
    assert sum(times for instruction, times in found if instruction.target == target) == expected > 0


def test_thunks_of_a_graph_are_inside_it_and_all_others_outside():
    graph = (
        "000: kCommandBuffer [source | sink]\n    001: kCopy [source]\n    002: kWhile [source]\n"
        "condition:\n        003: kCopy\n"
    )
    by_host = (
        "004: kWhile [source]\n      body:\n        000: kCommandBuffer [sink]\n"
        "            005: kCopy\n        006: kAllReduce\n"
    )
    assert read_thunks(graph) == (1, Counter())
    assert read_thunks(graph + by_host) == (2, Counter({"While": 1, "AllReduce": 1}))
    assert read_thunks("000: kCopy [source | sink] kCopy\n") == (0, Counter({"Copy": 1}))


@needs_compiler
def test_a_compiled_program_has_the_loops_and_branches_it_was_written_with():
    """What is written by hand above is what this version of jax prints."""

    def program(flag, x, stack):
        def inner(carry, _):
            return jnp.sin(carry) @ carry, None

        def outer(carry, matrix):
            return lax.scan(inner, carry, length=3)[0] + matrix, None

        x = lax.cond(flag, lambda x: jnp.cos(x) @ x, lambda x: x, x)
        x = lax.scan(outer, x, stack)[0]
        return lax.while_loop(lambda x: x[0, 0] < 100, lambda x: x + 1, x)

    on = h200.on_one_device()
    arguments = jnp.zeros((), bool), jnp.zeros((256, 256)), jnp.zeros((4, 256, 256))
    module = read_hlo(h200.compile(jax.jit(program), *h200.shapes(arguments, on)).hlo)
    computations = by_computation(module)
    (entry,) = {instruction.computation for instruction in module if instruction.in_entry}
    outside_branches = list(executed(computations, entry, CALLS | FUSIONS))
    assert sum(times for call, times in outside_branches if call.target.startswith("__cublas")) == 4 * 3
    loops = [(loop.trips, times) for loop, times in outside_branches if loop.opcode == "while"]
    assert sorted(loops, key=str) == [(3, 4), (4, 1), (None, 1)]
    (conditional,) = [instruction for instruction, _ in outside_branches if instruction.opcode == "conditional"]
    in_branches = [{i.target for i, _ in executed(computations, name, CALLS)} - {""} for name in conditional.calls]
    assert [bool(targets) for targets in in_branches] == [False, True]
