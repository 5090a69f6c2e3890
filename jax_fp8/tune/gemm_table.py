"""The fastest candidates for a machine's GEMMs: `tune` measures them once, a file keeps them, and only programs that
are traced inside `tuned_gemms` use them.

    table = fp8.tune(step, state, batch)  # measures on the device, and writes a file
    with fp8.tuned_gemms(table):
        state, metrics = step(state, batch)

One table gives one result, to the last bit. Without a table, cuBLASLt's heuristic chooses. What a candidate is:
`jax_fp8/kernels/tuned_gemms.py`.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import jax

from jax_fp8.core.files import Unreadable, read_json, shown, write_text
from jax_fp8.kernels import extension
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem, Ranks, using_ranks

HEADINGS = f"{'first us':>9} {'TFLOP/s':>7} {'best us':>9} {'TFLOP/s':>7} {'rank':>4} {'gain':>6}  GEMM"


@dataclass(frozen=True)
class Choice:
    """The fastest candidate, and the time of a call by the first and by the fastest, in microseconds.

    `skipped`: which ranks were left out, and why.
    """

    candidate: int
    first_us: float
    best_us: float
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class GemmTable:
    """The fastest GEMMs of one kind of GPU with one version of cuBLASLt; hashable, and it prints as a table.

    `tune` makes it, and `tuned_gemms` takes it.

    Args:
      device: the kind of GPU, as jax names it.
      cublaslt: the version.
      choices: pairs of a product (`GemmProblem`) and its fastest candidate, with times in microseconds (`Choice`).

    Example:
      >>> import jax_fp8 as fp8
      >>> table = fp8.GemmTable("NVIDIA H200", "13.1.0")
      >>> path = table.save("gemms.json")
      >>> fp8.GemmTable.load(path) == table
      True
    """

    device: str
    cublaslt: str
    choices: tuple[tuple[GemmProblem, Choice], ...] = ()

    @classmethod
    def load(cls, path: str | Path | None = None) -> "GemmTable":
        """Read a table.

        Args:
          path: of the file; None reads this machine's own in the user's cache folder, for which it needs the GPU.

        Returns:
          The table.

        Raises:
          ValueError: if there is no such file, or it is not one that `save` wrote; with `path=None` also where there is
            no GPU.
        """
        path = Path(path) if path is not None else default_path(*this_gpu())
        if not os.path.exists(path):
            raise ValueError(f"no table of tuned GEMMs is at {path}; make it with `python -m jax_fp8 tune` or fp8.tune")
        return _parse(path)

    def save(self, path: str | Path | None = None) -> Path:
        """Write the table, together with other choices that the file already holds.

        Another process sees the old file or the new one, never a part of it.

        Args:
          path: of the file; None is that of such a machine, in the user's cache folder.

        Returns:
          The path.

        Raises:
          ValueError: if the file cannot be written, or is not a table of the same GPU and cuBLASLt.
        """
        path = Path(path) if path is not None else default_path(self.device, self.cublaslt)
        merged = _parse(path).updated(self) if os.path.exists(path) else self
        gemms = [{**asdict(problem), **asdict(choice)} for problem, choice in sorted(merged._by_problem.items())]
        text = json.dumps({"device": self.device, "cublaslt": self.cublaslt, "gemms": gemms}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text + "\n")
        except OSError as error:
            raise ValueError(
                f"a table of tuned GEMMs must find room in {path}, got {error.strerror}; choose another path"
            ) from error
        return path

    def updated(self, other: "GemmTable") -> "GemmTable":
        """Add the choices of another table of the same GPU and cuBLASLt.

        Args:
          other: whose choices count where both tables have one.

        Returns:
          The new table.

        Raises:
          ValueError: if the other table is of another GPU or cuBLASLt.
        """
        if (self.device, self.cublaslt) != (other.device, other.cublaslt):
            raise ValueError(
                "tables of tuned GEMMs can be merged for one GPU and cuBLASLt, "
                f"got {self.made_on} and {other.made_on}; use another file"
            )
        return GemmTable(self.device, self.cublaslt, tuple({**self._by_problem, **other._by_problem}.items()))

    def restricted_to(self, problems: Iterable[GemmProblem]) -> "GemmTable":
        """Leave out all choices but those for some products.

        Args:
          problems: the products, in whose order the choices will be.

        Returns:
          The new table.
        """
        choices = ((problem, self._by_problem[problem]) for problem in problems if problem in self._by_problem)
        return GemmTable(self.device, self.cublaslt, tuple(choices))

    def candidate(self, problem: GemmProblem) -> int:
        """Look up the rank of the fastest candidate of a product.

        Args:
          problem: the product.

        Returns:
          The rank; 0, the heuristic's own choice, for a product that was not tuned.
        """
        return self.ranks.get(problem, 0)

    def rows(self) -> list[str]:
        """Write a line for every GEMM, to be printed below `HEADINGS`.

        Returns:
          The lines.
        """
        return [_row(*pair) for pair in self.choices]

    @cached_property
    def ranks(self) -> Ranks:
        """The rank of each choice, for `using_ranks`."""
        return Ranks({problem: choice.candidate for problem, choice in self.choices})

    @property
    def made_on(self) -> str:
        return f"{self.device} with cuBLASLt {self.cublaslt}"

    @cached_property
    def _by_problem(self) -> dict[GemmProblem, Choice]:
        return dict(self.choices)

    def __str__(self):
        return "\n".join([f"{self.made_on}: {len(self.choices)} GEMMs", HEADINGS, *self.rows()])


def tuned_gemms(table: GemmTable | None) -> AbstractContextManager:
    """Use a table for the FP8 GEMMs that are traced in this context; None is cuBLASLt's own choice, the default.

    The algorithm is part of the program. So jit keeps one program for each table, and compiles a step twice that is
    called inside and outside of the context: put the whole loop inside. With several processes, give all of them one
    file; with different tables they would differ in the last bits. A product that is not in the table takes the
    heuristic's choice. So does one whose arrays do not start at multiples of 256 bytes, as all arrays of jax do.

    Args:
      table: of this GPU and cuBLASLt, or None.

    Returns:
      A context manager.

    Raises:
      ValueError: if `table` is not a table; or on a GPU, if it is of another GPU or cuBLASLt.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> one = fp8.quantize(jnp.ones((16, 32)), fp8.E4M3, jnp.float32(1))
      >>> with fp8.tuned_gemms(None):
      ...     y = fp8.matmul(one, one)
      >>> y.shape
      (16, 16)
    """
    if table is not None and not isinstance(table, GemmTable):
        raise ValueError(f"tuned_gemms needs a GemmTable or None, got {table!r}; pass fp8.GemmTable.load(path)")
    if table is not None and jax.default_backend() == "gpu":
        device, cublaslt = this_gpu()
        if (table.device, table.cublaslt) != (device, cublaslt):
            raise ValueError(
                f"a table of tuned GEMMs must be of this GPU and cuBLASLt, {device} and {cublaslt}, "
                f"got one of {table.made_on}; tune again here"
            )
    return using_ranks(table.ranks if table is not None else Ranks())


def this_gpu() -> tuple[str, str]:
    """The kind of GPU and the version of cuBLASLt that a table of this machine belongs to."""
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"GEMMs are tuned on the GPU that will run them, got platform {jax.default_backend()!r}; "
            "run this on the machine that trains"
        )
    info = extension.build_info()
    if info["cublaslt_version"] is None:
        raise ValueError(f"GEMMs are tuned with cuBLASLt, which cannot be used here: {info['cublaslt_reason']}")
    return jax.devices()[0].device_kind, info["cublaslt_version"]


def default_path(device: str, cublaslt: str) -> Path:
    """The file of a machine's table, in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jax_fp8" / "gemm" / f"{re.sub(r'[^A-Za-z0-9.]+', '_', device)}-cublaslt-{cublaslt}.json"


def _row(problem: GemmProblem, choice: Choice) -> str:
    flops = 2 * problem.m * problem.n * problem.k
    figures = [f"{us:9.1f} {flops / us / 1e6:7.0f}" for us in (choice.first_us, choice.best_us)]
    gain = choice.first_us / choice.best_us - 1
    name = _describe(problem)
    return " ".join([*figures, f"{choice.candidate:4} {gain:6.1%}  {name}", *(f"[{why}]" for why in choice.skipped)])


def _describe(problem: GemmProblem) -> str:
    addends = f"{' + bias' if problem.has_bias else ''}{' + c' if problem.has_c else ''}"
    dtypes = " ".join(name.removeprefix("float8_").removesuffix("fn") for name in (problem.a, problem.b))
    shapes = f"({problem.m}, {problem.k}) · ({problem.n}, {problem.k})ᵀ"
    return f"{shapes}{addends} {dtypes} -> {problem.dtype} {problem.accumulation}"


def _parse(path: Path) -> GemmTable:
    try:
        content = read_json(path)
        entries, device, cublaslt = (content.get(name) for name in ("gemms", "device", "cublaslt"))
        if not isinstance(entries, list) or not isinstance(device, str) or not isinstance(cublaslt, str):
            raise Unreadable("no device, cublaslt and list of gemms")
        return GemmTable(device, cublaslt, tuple(map(_read, entries)))
    except Unreadable as error:
        raise ValueError(
            f"a table of tuned GEMMs must be a file that jax_fp8 wrote, got {path} ({error}); move it away and tune "
            "again"
        ) from None


def _read(entry: object) -> tuple[GemmProblem, Choice]:
    """The choice that an entry of a file holds; raise unless each field has the type and range that `save` writes."""
    checks: dict[str, Callable[..., bool]] = {
        **dict.fromkeys("mnk", lambda size: _is_integer(size) and 0 < size < 2**31),
        **dict.fromkeys(("a", "b", "dtype", "accumulation"), lambda name: isinstance(name, str)),
        **dict.fromkeys(("has_bias", "has_c"), lambda flag: isinstance(flag, bool)),
        "candidate": lambda rank: _is_integer(rank) and 0 <= rank < MAX_CANDIDATES,
        **dict.fromkeys(("first_us", "best_us"), _is_time),
        "skipped": lambda words: isinstance(words, list) and all(isinstance(word, str) for word in words),
    }
    if not isinstance(entry, dict) or not set(checks) <= set(entry):
        raise Unreadable(f"no fields {', '.join(checks)} in {shown(entry)}")
    for name, is_good in checks.items():
        if not is_good(entry[name]):
            raise Unreadable(f"no {name} of a GEMM but {shown(entry[name])}")
    if entry["best_us"] > entry["first_us"]:
        raise Unreadable(f"a best time above the first, {entry['best_us']} and {entry['first_us']}")
    problem = GemmProblem(**{field.name: entry[field.name] for field in fields(GemmProblem)})
    return problem, Choice(entry["candidate"], entry["first_us"], entry["best_us"], tuple(entry["skipped"]))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    """Whether this is a positive number of microseconds, below four months."""
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < 1e13
