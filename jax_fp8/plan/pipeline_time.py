"""The time of a pipeline's loop over ticks: in each tick, the stages wait for the slowest one.

Ticks, the compiled step ─pipeline_time→ how often each branch is the slowest of its tick, bubble ─estimate→ StepTime
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_fp8.inspect.hlo import BRANCHES, Instruction
from jax_fp8.kernels.uninitialized import TARGET
from jax_fp8.parallel.runner import LOSSES, UNIT
from jax_fp8.parallel.ticks import Ticks
from jax_fp8.plan.rates import Rates
from jax_fp8.plan.step_time import branch_seconds


@dataclass(frozen=True)
class PipelineTime:
    """The timing of one step.

    Args:
      bubble: the share of time in which a stage waits for slower ones, without transfers and losses.
      counts: by the name of a conditional, the number of ticks in which each of its branches is the slowest.
      slot_bytes: bytes of the residuals that a device keeps from forward to backward, and of its inboxes.
    """

    bubble: float
    counts: dict[str, tuple[int, ...]]
    slot_bytes: int

    def taken(self, conditional: Instruction) -> tuple[int, ...] | None:
        """How often the branches of this conditional run, for `estimate`; None for one that is not of a tick."""
        return self.counts.get(conditional.name)


def pipeline_time(ticks: Ticks, instructions: Sequence[Instruction], rates: Rates) -> PipelineTime:
    """The timing of a schedule's ticks in the compiled step.

    Args:
      instructions: the step, from `read_hlo`.
    """
    units, losses = _conditionals(UNIT, instructions), _conditionals(LOSSES, instructions)[0]
    seconds = {unit.name: branch_seconds(unit, instructions, rates) for unit in units}
    # The first branch of each conditional does nothing: the stage is idle, or another conditional has its unit.
    branches = np.array([0.0, *(branch for of_unit in seconds.values() for branch in of_unit[1:])])
    if len(branches) != 1 + len(ticks.branches):
        raise ValueError(
            f"the step must have been compiled with these ticks, which have {1 + len(ticks.branches)} branches, "
            f"got {len(branches)}; make both of one schedule"
        )
    times = branches[ticks.branch]  # (ticks, stages)
    slowest = np.take_along_axis(ticks.branch, times.argmax(axis=1, keepdims=True), axis=1)[:, 0]
    counts, first = {}, 1
    for name, of_unit in seconds.items():
        own = np.bincount(slowest, minlength=len(branches))[first : first + len(of_unit) - 1]
        counts[name] = len(slowest) - int(own.sum()), *own.tolist()
        first += len(own)
    groups = int(np.count_nonzero(ticks.loss >= 0))
    counts[losses.name] = len(slowest) - groups, groups
    return PipelineTime(
        bubble=float(1 - times.sum() / (times.shape[1] * times.max(axis=1).sum())),
        counts=counts,
        slot_bytes=sum(array.bytes for call in instructions if call.target == TARGET for array in call.results),
    )


def _conditionals(scope: str, instructions: Sequence[Instruction]) -> list[Instruction]:
    """The conditionals of a named scope, ordered by its number. The pattern ends with the scope's own `cond`, so
    conditionals inside their branches are left out.
    """
    pattern = re.compile(rf"\b{scope}(?:_(\d+))?/cond$")
    matches = [(pattern.search(each.op_name), each) for each in instructions if each.opcode in BRANCHES]
    numbered = {int(match[1] or 0): conditional for match, conditional in matches if match}
    return [numbered[number] for number in sorted(numbered)]
