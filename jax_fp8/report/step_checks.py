"""Findings about steps: numbers that are not finite, skipped steps, jumps of gradients, and spikes of the loss."""

import numpy as np

from jax_fp8.report.diagnosed import OUTPUT_GRADIENT, Diagnosed
from jax_fp8.report.finding import CRITICAL, NOTE, WARNING, Finding
from jax_fp8.report.formatting import counted, number, percent, step_list, tensor_name
from jax_fp8.report.run_folder import Event, Metrics

# A jump is a gradient norm of so many times the median of the diagnosed steps before. Norms of usual batches differ by
# less than a factor of 3.
JUMP = 10.0
JUMP_WINDOW = 20  # the median is over at most so many diagnosed steps
JUMP_HISTORY = 5  # and over at least so many, because norms change fast in the first steps
# A jump must also be this share of the norm of all gradients. Norms that grow from nearly nothing, as those of queries
# and keys do, are no jumps.
JUMP_SHARE = 0.3
# A spike is a loss of so many times the median of the rows before. A row is a mean over steps, and usually within some
# percent of that median.
SPIKE = 1.2
SPIKE_WINDOW, SPIKE_HISTORY = 10, 4  # rows of the median, at most and at least
SPIKE_NATS = 0.1  # a spike must also exceed the median by so much, because a loss near zero is mostly noise

NOT_FINITE, STOPPED, SKIPPED, JUMPS, SPIKES = "not finite", "stopped", "skipped steps", "gradient jump", "loss spike"
AVOID = "`step(state, batch, skip_above=limit)` skips steps with such a loss; a lower learning rate makes them rare."
REMEDIES = {
    NOT_FINITE: "Look at the batch of that step, and lower the learning rate; `fused_adamw(skip_nonfinite=True)` "
    "skips such steps.",
    STOPPED: "The section Events shows what changed in that step.",
    SKIPPED: "The section Events shows what changed in them. A few are harmless; many mean that the learning rate is "
    "too high.",
    JUMPS: AVOID,
    SPIKES: AVOID,
}


def check_finite(diagnosed: Diagnosed) -> list[Finding]:
    """The first steps with infinities or NaNs in losses, tensors and gradients."""
    findings = []
    if diagnosed.broken_tensors.any():
        findings.append(_broken_tensors(diagnosed))
    if diagnosed.broken_gradients.any():
        findings.append(_broken_gradients(diagnosed))
    losses = np.flatnonzero(np.isnan(diagnosed.losses))
    if len(losses):
        sentence = f"The loss was not finite at {step_list(diagnosed.steps[losses].tolist())}."
        findings.append(Finding(CRITICAL, NOT_FINITE, sentence, REMEDIES[NOT_FINITE]))
    return findings


def _broken_tensors(diagnosed: Diagnosed) -> Finding:
    broken = diagnosed.broken_tensors
    column = int(np.argmax(broken.any(axis=0)))
    rows = np.flatnonzero(broken[:, column])
    row = as_computed(diagnosed, rows)[0]
    backward = diagnosed.places[row][1] == OUTPUT_GRADIENT and len(rows) > 1
    why = " (the backward pass computes it first)" if backward else ""
    others = f" Of all {len(broken):,} tensors {len(rows):,} had such elements." if len(rows) > 1 else ""
    share = percent(diagnosed.quantity("nonfinite")[row, column])
    sentence = (
        f"The {tensor_name(diagnosed.places[row])} is not finite in {share} of its elements at step "
        f"{diagnosed.steps[column]:,}, and is the first such tensor{why}.{others} {_later(diagnosed, broken)}"
    )
    return Finding(CRITICAL, NOT_FINITE, sentence.strip(), REMEDIES[NOT_FINITE], 2.0, diagnosed.places[row])


def as_computed(diagnosed: Diagnosed, rows: np.ndarray) -> list[int]:
    """Rows of tensors in the order in which a step computes them: those of the forward pass, then the output gradients
    from the last layer to the first.
    """
    backward = {int(row) for row in rows if diagnosed.places[row][1] == OUTPUT_GRADIENT}
    return [*(int(row) for row in rows if row not in backward), *sorted(backward, reverse=True)]


def _broken_gradients(diagnosed: Diagnosed) -> Finding:
    broken = diagnosed.broken_gradients
    column = int(np.argmax(broken.any(axis=0)))
    rows = np.flatnonzero(broken[:, column])
    count = diagnosed.nonfinite_gradients[rows[0], column]
    what = "is too large for its norm"
    if count > 0:
        what = f"has {counted(int(count), 'element that is', 'elements that are')} not finite"
    others = ""
    if len(rows) > 1:
        others = (
            f" It is the first in program order of {len(rows):,} such layers among {len(broken):,}; the backward pass "
            f"computes {diagnosed.layers[rows[-1]]} first."
        )
    sentence = (
        f"The gradient of {diagnosed.layers[rows[0]]} {what}, at step {diagnosed.steps[column]:,}.{others} "
        f"{_later(diagnosed, broken)}"
    )
    return Finding(CRITICAL, NOT_FINITE, sentence.strip(), REMEDIES[NOT_FINITE], 1.0)


def _later(diagnosed: Diagnosed, broken: np.ndarray) -> str:
    """A sentence about the steps after the first one."""
    columns = np.flatnonzero(broken.any(axis=0))
    return f"This happened in {counted(len(columns), 'diagnosed step')}." if len(columns) > 1 else ""


def check_events(events: list[Event]) -> list[Finding]:
    """Steps that were skipped, and why a run stopped."""
    findings = []
    stops, skips = ([event for event in events if event.event == kind] for kind in ("stopped", "skipped"))
    for event in stops:
        sentence = f"The run stopped at step {event.step:,}, {loss_against_limit(event)}.{_fault(event)}"
        findings.append(Finding(CRITICAL, STOPPED, sentence, REMEDIES[STOPPED]))
    if skips:
        sentence = (
            f"{counted(len(skips), 'step')} changed nothing: {step_list([event.step for event in skips])}. The first "
            f"was skipped {loss_against_limit(skips[0])}.{_fault(skips[0])}"
        )
        findings.append(Finding(WARNING, SKIPPED, sentence, REMEDIES[SKIPPED]))
    return findings


def loss_against_limit(event: Event) -> str:
    """ "with a loss of 9.31, above the limit of 5.2"."""
    if np.isnan(event.sample.loss):
        return "with a loss that is not finite"
    above = f", above the limit of {number(event.limit)}" if event.sample.loss > event.limit else ""
    return f"with a loss of {number(event.sample.loss)}{above}"


def _fault(event: Event) -> str:
    return f" Diagnosed: {event.fault}." if event.fault else ""


def check_jumps(diagnosed: Diagnosed) -> list[Finding]:
    """Steps in which gradients are much larger than before. Neighbouring diagnosed steps are one jump."""
    ratios = norm_ratios(diagnosed.norms)
    whole = np.sqrt(np.nansum(diagnosed.norms.astype(float) ** 2, axis=0, keepdims=True))
    ratios = np.where(diagnosed.norms > JUMP_SHARE * medians_before(whole), ratios, np.nan)
    jumps = np.flatnonzero((ratios > JUMP).any(axis=0))
    if not len(jumps):
        return []
    stretches = np.split(jumps, np.flatnonzero(np.diff(jumps) > 1) + 1)
    return [_jump(diagnosed, ratios, norm_ratios(whole)[0], columns) for columns in stretches]


def norm_ratios(norms: np.ndarray) -> np.ndarray:
    """Norms divided by the median of earlier ones, (layers, steps); NaN where there are too few."""
    medians = medians_before(norms)
    return norms.astype(float) / np.where(medians > 0, medians, np.nan)


def medians_before(norms: np.ndarray) -> np.ndarray:
    """The median of the JUMP_WINDOW columns before each, (layers, steps); NaN if fewer than JUMP_HISTORY are known."""
    padded = np.pad(norms[:, :-1], ((0, 0), (JUMP_WINDOW, 0)), constant_values=np.nan)
    before = np.sort(np.lib.stride_tricks.sliding_window_view(padded, JUMP_WINDOW, axis=1), axis=2)  # NaN comes last
    count = np.isfinite(before).sum(axis=2, keepdims=True)
    middles = np.concatenate([np.maximum(count - 1, 0) // 2, np.minimum(count // 2, JUMP_WINDOW - 1)], axis=2)
    median = np.take_along_axis(before, middles, axis=2).mean(axis=2, dtype=float)
    return np.where(count[:, :, 0] >= JUMP_HISTORY, median, np.nan)


def _jump(diagnosed: Diagnosed, ratios: np.ndarray, whole: np.ndarray, columns: np.ndarray) -> Finding:
    """The finding about these columns; only a note if the norm of all gradients does not jump.

    Args:
      ratios: `norm_ratios` of the layers, (layers, steps).
      whole: `norm_ratios` of the norm of all gradients, (steps,).
    """
    stretch = np.nan_to_num(ratios[:, columns])
    row, worst = np.unravel_index(np.argmax(stretch), stretch.shape)
    count = int((stretch > JUMP).any(axis=1).sum())
    many = f" In {count:,} of {len(ratios):,} layers it was more than {JUMP:.0f} times the median." if count > 1 else ""
    most = float(np.nanmax(whole[columns]))
    sentence = (
        f"The gradient norm of {diagnosed.layers[row]} jumped to {number(diagnosed.norms[row, columns[worst]])} at "
        f"step {diagnosed.steps[columns[worst]]:,}, {number(stretch[row, worst])} times the median before.{many} "
        f"The norm of all gradients was {number(most)} times its median."
    )
    return Finding(WARNING if most > JUMP else NOTE, JUMPS, sentence, REMEDIES[JUMPS], float(stretch[row, worst]))


def check_loss(metrics: Metrics) -> list[Finding]:
    """Rows of the log whose training loss is a spike, well above the rows before."""
    known = np.isfinite(metrics.values["loss"])
    steps, losses = metrics.steps[known], metrics.values["loss"][known]
    findings, last = [], -SPIKE_WINDOW
    for row in range(SPIKE_HISTORY, len(losses)):
        before = float(np.median(losses[max(0, row - SPIKE_WINDOW) : row]))
        if losses[row] > max(SPIKE * before, before + SPIKE_NATS):
            if row - last > SPIKE_HISTORY:  # otherwise it belongs to the previous spike
                sentence = (
                    f"The training loss rose to {number(losses[row])} in the row of step {steps[row]:,}; the median of "
                    f"the rows before is {number(before)}."
                )
                findings.append(Finding(WARNING, SPIKES, sentence, REMEDIES[SPIKES], float(losses[row] - before)))
            last = row
    return findings
