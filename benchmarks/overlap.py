"""The time of collectives that is hidden behind compute, from intervals of kernels on each device of a trace.

    kernels of a device ─category→ intervals of collectives ┐
                                 └ intervals of all others  ┴→ hidden, exposed, gaps

A collective that waits for a slower device counts as running, so its time is more than that of its transfer.
"""

import dataclasses

import kernel_profile
import tables

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Milliseconds a step on one device.

    `span` is from the first kernel to the last, `compute` and `collectives` are the times in which any of them runs,
    `hidden` the time in which both run, and `gaps` that in which nothing runs.
    """

    span: float
    compute: float
    collectives: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.collectives - self.hidden

    @property
    def gaps(self) -> float:
        return self.span - self.compute - self.exposed


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def shared(first: list[Interval], second: list[Interval]) -> float:
    """The time that is in both lists of intervals, each as `union` returns it."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def device_time(kernels: list[dict], steps: int, instructions: dict) -> DeviceTime:
    """The times of one device, from its kernels as `kernel_profile.kernels_by_device` returns them."""
    groups: dict[bool, list[Interval]] = {True: [], False: []}
    for event in kernels:
        category = kernel_profile.categorize(event["name"], kernel_profile.lookup(event, instructions))
        groups[category == kernel_profile.COLLECTIVES].append((event["ts"], event["ts"] + event["dur"]))
    collectives, compute = union(groups[True]), union(groups[False])
    everything = union(collectives + compute)
    span = everything[-1][1] - everything[0][0]
    found = span, length(compute), length(collectives), shared(compute, collectives)
    return DeviceTime(*(microseconds / 1e3 / steps for microseconds in found))


def summarize(events: list[dict], steps: int, hlo_text: str) -> dict:
    """For every device, its times and its kernel time by category; for the first device, also every kernel."""
    instructions = kernel_profile.read_hlo(hlo_text)
    found = {}
    for device, kernels in kernel_profile.kernels_by_device(events).items():
        profile = kernel_profile.summarize_kernels(kernels, steps, instructions).to_json()
        if found:
            del profile["kernels"]
        times = device_time(kernels, steps, instructions)
        found[device] = {**profile, **dataclasses.asdict(times), "exposed": times.exposed, "gaps": times.gaps}
    return found


def markdown(found: dict) -> str:
    """Both tables of `summarize`, with a column for each device."""
    names = {device: device.rpartition("/device:")[2] for device in found}
    rows = [
        [name, *(of_device[name] for of_device in found.values())]
        for name in ("span", "compute", "collectives", "hidden", "exposed", "gaps")
    ]
    return "\n\n".join(
        [
            tables.table(["ms a step", *names.values()], rows),
            kernel_profile.merged({names[device]: of_device for device, of_device in found.items()}),
        ]
    )
