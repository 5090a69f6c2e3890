"""All findings of a run's folder, the worst first."""

from jax_fp8.report.expert_checks import check_experts
from jax_fp8.report.finding import LEVELS, Finding
from jax_fp8.report.run_folder import Event, RunFolder
from jax_fp8.report.step_checks import check_events, check_finite, check_jumps, check_loss
from jax_fp8.report.tensor_checks import check_tensors


def find(folder: RunFolder) -> list[Finding]:
    """The findings, sorted by level, then by kind, then by weight."""
    found: list[Finding] = []
    events: dict[str, list[Event]] = {}
    for event in folder.events:
        events.setdefault(event.run, []).append(event)
    for run in folder.runs:
        found += [finding._replace(run=run) for finding in _find_in(folder, run, events.get(run, []))]
    kinds = list(dict.fromkeys(finding.kind for finding in found))
    return sorted(found, key=lambda finding: (LEVELS.index(finding.level), kinds.index(finding.kind), -finding.weight))


def _find_in(folder: RunFolder, run: str, events: list[Event]) -> list[Finding]:
    found: list[Finding] = []
    diagnosed, metrics = folder.diagnosed.get(run), folder.metrics.get(run)
    if diagnosed is not None:
        found += check_finite(diagnosed)
    found += check_events(events)
    if diagnosed is not None:
        found += [*check_tensors(diagnosed), *check_jumps(diagnosed), *check_experts(diagnosed)]
    if metrics is not None:
        found += check_loss(metrics)
    return found
