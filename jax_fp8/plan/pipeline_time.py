"""What the loop over the ticks of a pipeline takes, where a stage that has done its unit waits for the slowest.

Ticks, the compiled step ─pipeline_time→ how often the branches of a tick count, the bubble ─estimate→ StepTime
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
    """Of a step on stages.

    Args:
      bubble: the share of the time of all units in which a stage waits for others, without transfers and losses.
      counts: by the name of a conditional, in how many ticks each of its branches is what takes longest.
      slot_bytes: of what a device keeps from forwards to backwards, and of what waits in its inboxes.
    """

    bubble: float
    counts: dict[str, tuple[int, ...]]
    slot_bytes: int

    def taken(self, conditional: Instruction) -> tuple[int, ...] | None:
        """How often its branches run, as `estimate` asks for it."""
        return self.counts.get(conditional.name)


def pipeline_time(ticks: Ticks, instructions: Sequence[Instruction], rates: Rates) -> PipelineTime:
    """What the ticks of a schedule mean for the compiled step, as `read_hlo` reads it."""
    units, losses = _conditionals(UNIT, instructions), _conditionals(LOSSES, instructions)[0]
    seconds = {unit.name: branch_seconds(unit, instructions, rates) for unit in units}
    of_branches = np.array([0.0, *(each for of_unit in seconds.values() for each in of_unit[1:])])  # the first is idle
    if len(of_branches) != 1 + len(ticks.branches):
        raise ValueError(
            f"the step must have been compiled with these ticks, which have {1 + len(ticks.branches)} branches, "
            f"got {len(of_branches)}; make both of one schedule"
        )
    times = of_branches[ticks.branch]  # (ticks, stages)
    slowest = np.take_along_axis(ticks.branch, times.argmax(axis=1, keepdims=True), axis=1)[:, 0]
    counts, first = {}, 1
    for name, of_unit in seconds.items():
        own = np.bincount(slowest, minlength=len(of_branches))[first : first + len(of_unit) - 1]
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
    """Those of a scope, by number; conditionals inside of their branches are of other scopes, too."""
    pattern = re.compile(rf"\b{scope}(?:_(\d+))?/cond$")
    matches = [(pattern.search(found.op_name), found) for found in instructions if found.opcode in BRANCHES]
    numbered = {int(match[1] or 0): found for match, found in matches if match}
    return [numbered[number] for number in sorted(numbered)]
