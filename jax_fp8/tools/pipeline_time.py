"""What the loop over the ticks of a pipeline takes, where a stage that has done its unit waits for the slowest.

Ticks, the compiled step ─pipeline_time→ how often the branches of a tick count, the bubble ─estimate→ StepTime
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_fp8.kernels.room import TARGET
from jax_fp8.parallel.runner import LOSSES, UNIT
from jax_fp8.parallel.ticks import Ticks
from jax_fp8.tools.hlo import BRANCHES, Instruction
from jax_fp8.tools.rates import Rates
from jax_fp8.tools.step_time import branch_seconds


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
    unit, losses = (_conditional(scope, instructions) for scope in (UNIT, LOSSES))
    of_branches = np.array(branch_seconds(unit, instructions, rates))
    if len(of_branches) != 1 + len(ticks.branches):
        raise ValueError(
            f"the step must have been compiled with these ticks, which have {1 + len(ticks.branches)} branches, "
            f"got {len(of_branches)}; make both of one schedule"
        )
    units = of_branches[ticks.branch]  # (ticks, stages)
    slowest = np.take_along_axis(ticks.branch, units.argmax(axis=1, keepdims=True), axis=1)
    groups = int(np.count_nonzero(ticks.loss >= 0))
    return PipelineTime(
        bubble=float(1 - units.sum() / (units.shape[1] * units.max(axis=1).sum())),
        counts={
            unit.name: tuple(np.bincount(slowest[:, 0], minlength=len(of_branches)).tolist()),
            losses.name: (len(ticks.loss) - groups, groups),
        },
        slot_bytes=sum(array.bytes for call in instructions if call.target == TARGET for array in call.results),
    )


def _conditional(scope: str, instructions: Sequence[Instruction]) -> Instruction:
    """The one of a scope; conditionals inside of its branches are of other scopes, too."""
    return next(
        instruction
        for instruction in instructions
        if instruction.opcode in BRANCHES and instruction.op_name.endswith(f"{scope}/cond")
    )
