"""Which meshes of a number of GPUs are worth compiling for, and which changes would make a step fit.

    Setting, devices ─meshes_of→ settings, and excluded meshes ─rank→ a few to compile for; the rest ─left_out→ why
    Setting, bytes of the compiled step ─remedies→ changes, and about how much a device would need with them

Both estimate by arithmetic (plan/arithmetic.py).
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax_fp8.plan.arithmetic import memory_of, seconds_of
from jax_fp8.plan.described import HOST
from jax_fp8.plan.rates import Rates
from jax_fp8.plan.setting import Setting

GIB = 2**30
SHOWN = 8  # meshes that a paragraph lists
MOST_CHUNKS = 8
COLUMNS = 120  # of a printed line
CLOSE = 1.05  # the error of arithmetic: a step may fit that seems too large by this factor, and the other way round


@dataclass(frozen=True)
class Excluded:
    """A mesh that cannot run the step, or makes no sense for it, whatever its memory and time."""

    setting: Setting
    reason: str


def meshes_of(base: Setting, devices: int, microbatches: Sequence[int] = ()) -> tuple[list[Setting], list[Excluded]]:
    """All ways to spread a step over this number of devices, and the meshes that are excluded.

    Args:
      microbatches: the numbers of microbatches to try; by default only that of `base`.
    """
    settings, excluded = [], []
    for mesh in _meshes(base, devices):
        counts = microbatches or (base.microbatches,)
        enough = [count for count in counts if count >= mesh.pipe] or counts[-1:]
        several = [replace(mesh, microbatches=count) for count in enough]
        tried = [setting for one in several for setting in _schedules(one)]
        reasons = {setting: _why_not(setting) for setting in tried}
        settings += [setting for setting, reason in reasons.items() if not reason]
        if all(reasons.values()):
            excluded.append(Excluded(tried[0], reasons[tried[0]]))
    return settings, excluded


def _meshes(base: Setting, devices: int) -> Iterator[Setting]:
    for pipe in _divisors(devices):
        for tensor in _divisors(devices // pipe):
            for fsdp in _divisors(devices // pipe // tensor):
                data = devices // pipe // tensor // fsdp
                for sequence_parallel in (False, True) if tensor > 1 else (False,):
                    yield replace(
                        base, pipe=pipe, data=data, fsdp=fsdp, tensor=tensor, sequence_parallel=sequence_parallel
                    )


def _schedules(setting: Setting) -> Iterator[Setting]:
    """The setting with each schedule that may be the best one on its mesh."""
    yield replace(setting, schedule="1f1b", chunks=1)
    if setting.pipe > 1:
        yield replace(setting, schedule="zero-bubble", chunks=1)
        for chunks in range(2, min(MOST_CHUNKS, setting.shape.layers // setting.pipe) + 1):
            yield replace(setting, schedule="interleaved", chunks=chunks)


@dataclass(frozen=True)
class Change:
    """One change of a setting, in a user's words. A change replaces an earlier one of the same kind."""

    kind: str
    words: str
    setting: Setting


@dataclass(frozen=True)
class Ranking:
    """By arithmetic: the few settings to compile for, slower ones that should fit, and those that do not fit."""

    best: list[Setting]
    slower: list[Setting]
    too_large: list[Setting]


def rank(settings: Sequence[Setting], usable: float, rates: Rates, tries: int) -> Ranking:
    """Rank the meshes, the fastest first. Each mesh has the fastest schedule and number of microbatches that fit.

    Args:
      usable: bytes of a device that a program may use.
      tries: the number of settings to compile for.
    """
    by_mesh: dict[tuple[str, bool], list[Setting]] = {}
    for setting in settings:
        by_mesh.setdefault((setting.mesh, setting.sequence_parallel), []).append(setting)
    fitting, too_large = [], []
    for of_mesh in by_mesh.values():
        small = [setting for setting in of_mesh if memory_of(setting).together <= CLOSE * usable]
        if small:
            fitting.append(min(small, key=lambda setting: seconds_of(setting, rates)))
        else:
            too_large.append(min(of_mesh, key=lambda setting: memory_of(setting).together))
    fitting.sort(key=lambda setting: seconds_of(setting, rates))
    return Ranking(fitting[:tries], fitting[tries:], too_large)


def left_out(ranking: Ranking, excluded: Sequence[Excluded], rates: Rates) -> list[str]:
    """Lines that say which meshes were not compiled for, in a paragraph for each kind of reason."""
    slower = [f"{setting} {1e3 * seconds_of(setting, rates):.0f}" for setting in ranking.slower]
    by_size = sorted(ranking.too_large, key=lambda setting: memory_of(setting).together)
    too_large = [f"{setting} {memory_of(setting).together / GIB:.0f}" for setting in by_size]
    meshes = Counter(mesh.reason for mesh in excluded)
    reasons = [f"{reason}{f' ({count} times)' if count > 1 else ''}" for reason, count in meshes.items()]
    best = f", {1e3 * seconds_of(ranking.best[0], rates):.0f} for the best" if ranking.best else ""
    paragraphs = {
        f"Slower by arithmetic (ms{best})": slower,
        "Too large by arithmetic (GiB)": too_large,
        "Not tried": reasons,
    }
    return [
        line
        for heading, parts in paragraphs.items()
        if parts
        for line in textwrap.wrap(
            f"{heading}: {'; '.join(_some(parts))}.", COLUMNS, subsequent_indent="  ", break_on_hyphens=False
        )
    ]


def _some(parts: list[str]) -> list[str]:
    return parts if len(parts) <= SHOWN else [*parts[:SHOWN], f"and {len(parts) - SHOWN} more"]


def remedies(setting: Setting, peak: float, usable: float) -> list[str]:
    """Changes that would make a step fit which does not: each change that is enough by itself. If none is, several of
    them that are enough together, and a larger number of devices. Empty if nothing helps.

    Args:
      peak: bytes that the compiled step needs. Arithmetic only gives what a change saves of them.
      usable: bytes of a device that a program may use.
    """
    now, usable = memory_of(setting).together, usable / CLOSE

    def needed(change: Change) -> float:
        return peak + memory_of(change.setting).together - now

    def line(words: str, change: Change) -> str:
        return f"{words}: about {needed(change) / GIB:.0f} GiB"

    enough: dict[str, Change] = {}
    for change in _changes(setting):
        if needed(change) <= usable:
            enough.setdefault(change.kind, change)  # the smallest of its kind
    if enough:
        return [line(change.words, change) for change in enough.values()]
    lines = []
    for without in ("--remat", ""):  # --remat costs a third of a step or more, so it is the last resort
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


def _on_more_devices(setting: Setting) -> Iterator[Change]:
    """For twice as many devices, four times as many, and so on, the mesh that needs the least memory."""
    for devices in (setting.devices * 2**n for n in range(1, 11)):
        settings, _ = meshes_of(setting, devices)
        if settings:
            best = min(settings, key=lambda other: memory_of(other).together)
            yield Change("", f"{devices} GPUs by {best.flags}", best)


def _changes(setting: Setting) -> Iterator[Change]:
    """Single changes that are possible, in the order in which they are worth trying."""
    data, fsdp, tensor = setting.data, setting.fsdp, setting.tensor
    candidates: list[tuple[str, Setting]] = [
        ("--recompute", replace(setting, recompute=True)),
        *(("--remat", replace(setting, offloaded=n)) for n in _divisors(setting.shape.layers)[1:-1]),
        ("--remat", replace(setting, full=True)),
        ("--sequence-parallel", replace(setting, sequence_parallel=tensor > 1)),
        *(("--microbatches", replace(setting, microbatches=n * setting.microbatches)) for n in (2, 4, 8, 16)),
        ("--mesh", replace(setting, data=1, fsdp=data * fsdp)),
        *([("--mesh", replace(setting, fsdp=fsdp // 2, tensor=2 * tensor))] if fsdp % 2 == 0 else []),
        ("--bf16-moments", replace(setting, bf16_moments=True)),
        ("--bf16-params", replace(setting, bf16_params=True)),
    ]
    for kind, changed in candidates:
        if changed != setting and not _why_not(changed):
            remat = "full" if changed.full else f"offload:{changed.offloaded}"
            values = {"--microbatches": changed.microbatches, "--mesh": changed.mesh, "--remat": remat}
            value = f" {values[kind]}" if kind in values else ""
            yield Change(kind, kind + value, changed)


def _why_not(setting: Setting) -> str:
    """Why a step cannot be spread like this, or should not be; "" if it can."""
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
        return "layers have only one option of remat"
    if setting.fp8_attention and setting.pipe > 1:
        return "a pipeline has no attention in FP8"
    if setting.offloaded and setting.pipe > 1:
        return "a pipeline cannot offload residuals to the host"
    if setting.batch % parts:
        return f"{parts} parts do not divide a batch of {setting.batch}"
    if tensor > HOST:
        return f"tensor={tensor} is more than the {HOST} GPUs of a host"
    if setting.sequence_parallel and setting.by_tile:
        return "sequence parallelism does not support BlockScaling"
    if setting.sequence_parallel and setting.tokens % tensor:
        return f"tensor={tensor} does not divide {setting.tokens:.0f} rows"
    return ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
