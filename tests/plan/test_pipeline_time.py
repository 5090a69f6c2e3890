"""The loop over the ticks of a pipeline, from HLO written here: in each tick all wait for the slowest stage."""

import dataclasses

import pytest

from jax_fp8.inspect.hlo import read_hlo
from jax_fp8.parallel.schedule import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from jax_fp8.parallel.schedules import make_schedule
from jax_fp8.parallel.ticks import make_ticks
from jax_fp8.parallel.timeline import Costs, make_timeline
from jax_fp8.plan.pipeline_time import pipeline_time
from jax_fp8.plan.rates import Rates
from jax_fp8.plan.step_time import estimate

ONE = ((1.0, 1.0),)
BYTES = Rates(ONE, ONE, ONE, ONE, ONE, memory=1.0, wire=1.0, between_hosts=1.0, collective=0.0, launch=0.0, beside=0.0)
ROWS = {FORWARD: 10, INPUT_GRADIENT: 12, WEIGHT_GRADIENT: 8}
LOSS = 100
SCHEDULES = [("gpipe", 2, 3, 1), ("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2), ("zero-bubble", 4, 12, 1)]


def computation(name: str, rows: int) -> str:
    """One that reads so many bytes."""
    return f"""%{name} (p.{name}: (u8[8])) -> (u8[8]) {{
  %p.{name} = (u8[8]{{0}}) parameter(0)
  %x.{name} = u8[{rows}]{{0}} parameter(1)
  ROOT %r.{name} = u8[0]{{0}} custom-call(%x.{name}), custom_call_target="work"
}}
"""


def program(ticks) -> str:
    """A loop over ticks with the two conditionals of the runner, and another that the first branch holds."""
    rows = [ROWS[branch.kind] if branch.kind in ROWS else 20 for branch in ticks.branches]
    branches = [computation("idle", 0).replace("  ROOT %r.idle", "  %unused.idle").replace("custom-call", "bitcast")]
    branches += [computation(f"branch_{number}", count) for number, count in enumerate(rows)]
    names = ", ".join(["%idle", *(f"%branch_{number}" for number in range(len(rows)))])
    path = "jit(step)/while/body"
    unit = f'branch_computations={{{names}}}, metadata={{op_name="{path}/pipeline_unit_0/cond"}}'
    inside = f'branch_computations={{%idle}}, metadata={{op_name="{path}/pipeline_unit_0/cond/branch_1_fun/cond"}}'
    branches[1] = branches[1].replace("  ROOT", f"  %inside = (u8[8]{{0}}) conditional(%p.branch_0), {inside}\n  ROOT")
    losses = f'true_computation=%losses, false_computation=%none, metadata={{op_name="{path}/pipeline_losses/cond"}}'
    loop = f'body=%body, backend_config={{"known_trip_count":{{"n":"{len(ticks.loss)}"}}}}'
    return f"""HloModule step, is_scheduled=true, num_partitions=4

{"".join(branches)}
{computation("losses", LOSS)}
{computation("none", 0).replace("custom-call", "bitcast")}
%body (p: (u8[8])) -> (u8[8]) {{
  %p = (u8[8]{{0}}) parameter(0)
  %u = (u8[8]{{0}}) conditional(%p), {unit}
  ROOT %l = (u8[8]{{0}}) conditional(%u), {losses}
}}
ENTRY %main (x: u8[8]) -> u8[8] {{
  %x = u8[8]{{0}} parameter(0)
  %slots = (u8[300]{{0}}, bf16[50]{{0}}) custom-call(), custom_call_target="jax_fp8_uninitialized"
  ROOT %w = (u8[8]{{0}}) while(%x), {loop}
}}
"""


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SCHEDULES)
def test_the_loop_takes_what_the_timeline_of_its_schedule_does(name, stages, microbatches, chunks):
    schedule = make_schedule(name, stages, microbatches, chunks)
    ticks = make_ticks(schedule)
    instructions = read_hlo(program(ticks))
    found = pipeline_time(ticks, instructions, BYTES)
    costs = Costs(**{kind.value.replace(" ", "_"): chunks * float(rows) for kind, rows in ROWS.items()})
    timeline, groups = make_timeline(schedule, costs), -(-microbatches // stages)
    assert found.bubble == pytest.approx(timeline.bubble) and 0 < found.bubble < 1
    room = 2 * 50  # bytes without a type are a workspace, which nobody reads
    of_loop = estimate(instructions, BYTES, found.taken).seconds - room
    assert of_loop == pytest.approx(timeline.time + groups * LOSS)
    longest = estimate(instructions, BYTES).seconds - room  # negative control: every tick as long as the longest
    assert longest >= len(ticks.loss) * (20 - 8 + LOSS) > of_loop


def test_what_is_kept_is_room_of_the_slots():
    ticks = make_ticks(make_schedule("1f1b", 2, 2))
    assert pipeline_time(ticks, read_hlo(program(ticks)), BYTES).slot_bytes == 300 + 2 * 50


def test_ticks_of_another_schedule_are_refused():
    ticks, others = (make_ticks(make_schedule("1f1b", 2, count)) for count in (2, 4))
    assert len(ticks.branches) != len(others.branches)
    with pytest.raises(ValueError, match="the step must have been compiled with these ticks, which have"):
        pipeline_time(others, read_hlo(program(ticks)), BYTES)


def test_a_slower_memory_makes_no_other_bubble():
    ticks = make_ticks(make_schedule("zero-bubble", 2, 4))
    slow = dataclasses.replace(BYTES, memory=0.5)
    bubbles = {pipeline_time(ticks, read_hlo(program(ticks)), rates).bubble for rates in (BYTES, slow)}
    assert len(bubbles) == 1
