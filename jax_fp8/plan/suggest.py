"""Which meshes of so many GPUs are worth compiling for, and which change would make a step fit.

    Setting, devices ─meshes_of→ settings, and why others cannot be ─rank→ a few to compile for; the rest ─left_out→ why
    Setting, bytes that were found ─remedies→ changes, and about what a device would need with them

Both by arithmetic (plan/arithmetic.py).
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax_fp8.plan.arithmetic import Setting, memory_of, seconds_of
from jax_fp8.plan.described import HOST
from jax_fp8.plan.rates import Rates

GIB = 2**30
SHOWN = 8  # meshes of a kind
MOST_CHUNKS = 8
COLUMNS = 120  # of a printed line
CLOSE = 1.05  # what arithmetic finds this much too large may still fit, and what is only this much smaller may not


@dataclass(frozen=True)
class Left:
    """A mesh that is not tried, whatever its memory and time."""

    setting: Setting
    reason: str


def meshes_of(base: Setting, devices: int, microbatches: Sequence[int] = ()) -> tuple[list[Setting], list[Left]]:
    """All ways to spread a step over so many devices, and those that cannot be or make no sense.

    Args:
      microbatches: to try; none: those of `base`.
    """
    found, left = [], []
    for mesh in _meshes(base, devices):
        counts = microbatches or (base.microbatches,)
        enough = [count for count in counts if count >= mesh.pipe] or counts[-1:]
        several = [replace(mesh, microbatches=count) for count in enough]
        tried = [setting for one in several for setting in _schedules(one)]
        reasons = {setting: _why_not(setting) for setting in tried}
        found += [setting for setting, reason in reasons.items() if not reason]
        if all(reasons.values()):
            left.append(Left(tried[0], reasons[tried[0]]))
    return found, left


def _meshes(base: Setting, devices: int) -> Iterator[Setting]:
    for pipe in _divisors(devices):
        for tensor in _divisors(devices // pipe):
            for fsdp in _divisors(devices // pipe // tensor):
                data = devices // pipe // tensor // fsdp
                for sequence_parallel in (False, True) if tensor > 1 else (False,):
                    sizes = {"pipe": pipe, "data": data, "fsdp": fsdp, "tensor": tensor}
                    yield replace(base, **sizes, sequence_parallel=sequence_parallel)


def _schedules(setting: Setting) -> Iterator[Setting]:
    """With each schedule that may be the best on this mesh."""
    yield replace(setting, schedule="1f1b", chunks=1)
    if setting.pipe > 1:
        yield replace(setting, schedule="zero-bubble", chunks=1)
        for chunks in range(2, min(MOST_CHUNKS, setting.shape.layers // setting.pipe) + 1):
            yield replace(setting, schedule="interleaved", chunks=chunks)


@dataclass(frozen=True)
class Ranking:
    """By arithmetic: the few meshes to compile for, others that should fit, and those that do not."""

    best: list[Setting]
    slower: list[Setting]
    too_large: list[Setting]


def rank(settings: Sequence[Setting], usable: float, rates: Rates, tries: int) -> Ranking:
    """The fastest first; of each mesh the fastest schedule and microbatches that fit.

    Args:
      usable: bytes of a device.
      tries: for how many to compile.
    """
    of_meshes: dict[tuple, list[Setting]] = {}
    for setting in settings:
        of_meshes.setdefault((setting.mesh, setting.sequence_parallel), []).append(setting)
    fitting, too_large = [], []
    for of_mesh in of_meshes.values():
        small = [setting for setting in of_mesh if memory_of(setting).together <= CLOSE * usable]
        if small:
            fitting.append(min(small, key=lambda setting: seconds_of(setting, rates)))
        else:
            too_large.append(min(of_mesh, key=lambda setting: memory_of(setting).together))
    fitting.sort(key=lambda setting: seconds_of(setting, rates))
    return Ranking(fitting[:tries], fitting[tries:], too_large)


def left_out(ranking: Ranking, impossible: Sequence[Left], rates: Rates) -> list[str]:
    """Which meshes were not compiled for, and why, in a paragraph for each kind of reason."""
    slower = [f"{setting} {1e3 * seconds_of(setting, rates):.0f}" for setting in ranking.slower]
    by_size = sorted(ranking.too_large, key=lambda setting: memory_of(setting).together)
    too_large = [f"{setting} {memory_of(setting).together / GIB:.0f}" for setting in by_size]
    meshes = Counter(left.reason for left in impossible)
    reasons = [f"{reason}{f' ({count} times)' if count > 1 else ''}" for reason, count in meshes.items()]
    best = f", {1e3 * seconds_of(ranking.best[0], rates):.0f} for the best" if ranking.best else ""
    paragraphs = {
        f"Slower by arithmetic (ms{best})": slower,
        "Too large by arithmetic (GiB)": too_large,
        "Not tried": reasons,
    }
    return [
        line
        for heading, found in paragraphs.items()
        if found
        for line in textwrap.wrap(
            f"{heading}: {'; '.join(_some(found))}.", COLUMNS, subsequent_indent="  ", break_on_hyphens=False
        )
    ]


def _some(found: list[str]) -> list[str]:
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def remedies(setting: Setting, peak: float, usable: float) -> list[str]:
    """What to change so that a step fits which needs `peak` bytes: each change that is enough by itself or, if none is,
    as many together as it takes, and how many more devices; nothing where nothing helps. What a change saves is
    arithmetic; it is taken from the bytes that were found.
    """
    now, usable = memory_of(setting).together, usable / CLOSE

    def needed(change):
        return peak + memory_of(change.setting).together - now

    def line(words, change):
        return f"{words}: about {needed(change) / GIB:.0f} GiB"

    enough: dict[str, Change] = {}
    for change in _changes(setting):
        if needed(change) <= usable:
            enough.setdefault(change.kind, change)  # the smallest of its kind
    if enough:
        return [line(change.words, change) for change in enough.values()]
    lines = []
    for without in ("--remat", ""):  # what costs a third of a step or more is the last resort
        made = [Change("", "", setting)]
        while needed(made[-1]) > usable:
            possible = [change for change in _changes(made[-1].setting) if change.kind != without]
            better = [change for change in possible if needed(change) < needed(made[-1])]
            if not better:
                break
            last = next((change for change in better if needed(change) <= usable), None)
            made.append(last or min(better, key=needed))
        if needed(made[-1]) <= usable:
            words = ", ".join({change.kind: change.words for change in made[1:]}.values())
            lines = [line(f"{words}, all together", made[-1])]
            break
    more = next((change for change in _on_more_devices(setting) if needed(change) <= usable), None)
    return [*lines, *([line(more.words, more)] if more else [])]


@dataclass(frozen=True)
class Change:
    """Of one thing, as a user says it; one of a kind replaces another."""

    kind: str
    words: str
    setting: Setting


def _on_more_devices(setting: Setting) -> Iterator[Change]:
    """The mesh that needs least, of twice as many devices, of four times as many, and so on."""
    for devices in (setting.devices * 2**n for n in range(1, 11)):
        found, _ = meshes_of(setting, devices)
        if found:
            best = min(found, key=lambda other: memory_of(other).together)
            yield Change("", f"{devices} GPUs by {best.flags}", best)


def _changes(setting: Setting) -> Iterator[Change]:
    """In the order in which we would try them, without those that cannot be."""
    data, fsdp, tensor = setting.data, setting.fsdp, setting.tensor
    wanted: list[tuple[str, dict]] = [
        ("--recompute", {"recompute": True}),
        *(("--remat", {"offloaded": n}) for n in _divisors(setting.shape.layers)[1:-1]),
        ("--remat", {"full": True}),
        ("--sequence-parallel", {"sequence_parallel": tensor > 1}),
        *(("--microbatches", {"microbatches": n * setting.microbatches}) for n in (2, 4, 8, 16)),
        ("--mesh", {"data": 1, "fsdp": data * fsdp}),
        *([("--mesh", {"fsdp": fsdp // 2, "tensor": 2 * tensor})] if fsdp % 2 == 0 else []),
        ("--bf16-moments", {"bf16_moments": True}),
        ("--bf16-params", {"bf16_params": True}),
    ]
    for kind, fields in wanted:
        changed = replace(setting, **fields)
        if changed != setting and not _why_not(changed):
            remat = "full" if changed.full else f"offload:{changed.offloaded}"
            values = {"--microbatches": changed.microbatches, "--mesh": changed.mesh, "--remat": remat}
            value = f" {values[kind]}" if kind in values else ""
            yield Change(kind, kind + value, changed)


def _why_not(setting: Setting) -> str:
    """Why a step cannot be spread like this; "" if it can."""
    shape, tensor = setting.shape, setting.tensor
    parts = setting.data * setting.fsdp * setting.microbatches
    if shape.heads % tensor:
        return f"tensor={tensor} does not divide {shape.heads} heads"
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        return f"tensor={tensor} and {shape.kv_heads} key and value heads do not divide each other"
    if shape.mlp % tensor:
        return f"tensor={tensor} does not divide an MLP {shape.mlp} wide"
    if shape.vocab % tensor:
        return f"tensor={tensor} does not divide a vocabulary of {shape.vocab}"
    if shape.layers % (setting.pipe * setting.chunks):
        of_chunks = f" with {setting.chunks} chunks" if setting.chunks > 1 else ""
        return f"pipe={setting.pipe}{of_chunks} does not divide {shape.layers} layers"
    if shape.width % (setting.fsdp * setting.pipe):
        of_pipe = f"pipe={setting.pipe} and " if setting.pipe > 1 else ""
        return f"{of_pipe}fsdp={setting.fsdp} does not divide a width of {shape.width}"
    if setting.microbatches < setting.pipe or (setting.chunks > 1 and setting.microbatches % setting.pipe):
        return f"pipe={setting.pipe} needs as many microbatches, or a multiple, not {setting.microbatches}"
    if setting.recompute + setting.full + bool(setting.offloaded) > 1:
        return "a layer keeps what one option of remat says"
    if setting.fp8_attention and setting.pipe > 1:
        return "a pipeline has no attention in FP8"
    if setting.offloaded and setting.pipe > 1:
        return "the layers of a pipeline keep nothing on the host"
    if setting.batch % parts:
        return f"{parts} parts do not divide a batch of {setting.batch}"
    if tensor > HOST:
        return f"tensor={tensor} is more than the {HOST} GPUs of a host"
    if setting.sequence_parallel and setting.by_tile:
        return "sequence parallelism gathers no activations with scales by tile"
    if setting.sequence_parallel and setting.tokens % tensor:
        return f"tensor={tensor} does not divide {setting.tokens:.0f} rows"
    return ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
