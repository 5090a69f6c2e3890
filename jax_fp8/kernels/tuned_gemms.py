"""Which of cuBLASLt's algorithms a GEMM takes: its heuristic's first choice, or a better one that was measured.

For every product cuBLASLt offers up to 16 algorithms, the candidates, in the order of the time that it expects: always
the same order for one of its versions and one kind of GPU. Where a kernel of our own multiplies, it comes before
these. So a candidate is told by its rank, and a GEMM asks its context for the rank of the product that it is about to
compute:

    with using_ranks(Ranks({GemmProblem(...): 3})):
        ...  # what is traced here

Candidates add in different orders, so their results differ in the last bits: the same ranks, the same result.
Measuring candidates and remembering the best is the work of `jax_fp8/tune`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

MAX_CANDIDATES = 16  # as in csrc/gemm_plan.h


@dataclass(frozen=True, order=True)
class GemmProblem:
    """What cuBLASLt chooses an algorithm by: (m, k) · (n, k)ᵀ of one device.

    Args:
      a, b, dtype: names of the dtypes of the operands and of the result.
      has_bias, has_c: what is added.
      accumulation: "fast" or "split", or how the tiles of a and b are scaled: "1d2d", "2d1d" or "1d1d".
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    dtype: str
    has_bias: bool
    has_c: bool
    accumulation: str


class Ranks(Mapping[GemmProblem, int]):
    """The candidates to take, by their rank; hashable, since jit keeps a program for each that it was traced with."""

    def __init__(self, ranks: Mapping[GemmProblem, int] | None = None):
        # Rank 0 is what a product takes that is not listed.
        self._ranks = {problem: rank for problem, rank in (ranks or {}).items() if rank != 0}
        self._hash = hash(frozenset(self._ranks.items()))  # jax asks for it hundreds of times while it traces

    def __getitem__(self, problem: GemmProblem) -> int:
        return self._ranks[problem]

    def __iter__(self) -> Iterator[GemmProblem]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Ranks({self._ranks})"


def using_ranks(ranks: Ranks) -> AbstractContextManager:
    """Take these candidates in the FP8 GEMMs that are traced in this context; the heuristic's choice in all others."""
    return _in_use(ranks)


def ranks_in_use() -> Ranks:
    """The ranks of the context being traced in."""
    return _in_use.value


_in_use = jax.make_user_context(default_value=Ranks())
