"""Which of cuBLASLt's algorithms a product takes: csrc/gemm_plan.cc, compiled here, over a cuBLASLt that is made up."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ALIGNED, LESS_ALIGNED = 4096, 4096 + 16
HEADER = "cuda_runtime_api.h"


def include_folder() -> pathlib.Path | None:
    """Where the CUDA toolkit, or the wheels that stand for it, keep their headers."""
    toolkits = [*sorted(pathlib.Path("/usr/local").glob("cuda*/include"))]
    wheels = [pathlib.Path(base) / "nvidia/cu13/include" for base in sys.path]
    return next((folder for folder in toolkits + wheels if (folder / HEADER).exists()), None)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler, include = shutil.which("c++") or shutil.which("g++"), include_folder()
    if compiler is None or include is None:
        pytest.skip(f"needs a C++ compiler and {HEADER}, which comes with the CUDA toolkit")
    path = tmp_path_factory.mktemp("gemm_plan") / "check"
    sources = [ROOT / "tests/csrc/gemm_plan_check.cc", ROOT / "csrc/gemm_plan.cc"]
    subprocess.run([compiler, "-std=c++20", f"-I{ROOT / 'csrc'}", f"-I{include}", *sources, "-o", path], check=True)
    return path


def ask(program, candidate, offered, unsound=-1, address=ALIGNED):
    """The failure, whether it is of a rank, how many requested, which ran, questions after preparing, c is not d."""
    arguments = [str(number) for number in (candidate, offered, unsound, address)]
    finished = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    failure, numbers, _ = finished.stdout.splitlines()
    return failure, *map(int, numbers.split())


@pytest.mark.parametrize(("candidate", "offered", "requested"), [(0, 7, 1), (3, 7, 16), (6, 7, 16), (15, 40, 16)])
def test_the_candidate_of_a_rank_runs(program, candidate, offered, requested):
    assert ask(program, candidate, offered) == ("", False, requested, 100 + candidate, 0, True)


def test_a_rank_counts_only_what_is_sound(program):
    assert ask(program, 3, 7, unsound=1)[:4] == ("", False, 16, 104)
    assert ask(program, 3, 7, unsound=5)[:4] == ("", False, 16, 103)


@pytest.mark.parametrize(("candidate", "offered", "unsound", "sound"), [(7, 7, -1, 7), (6, 7, 0, 6), (15, 1, -1, 1)])
def test_a_rank_past_the_list_is_refused(program, candidate, offered, unsound, sound):
    failure, off_the_list, _, ran, *_ = ask(program, candidate, offered, unsound)
    assert failure == (
        f"candidate must be one of the {sound} algorithms that cuBLASLt 13.1.0 offers for this product, "
        f"got rank {candidate}; tune again on this machine"
    )
    assert off_the_list and ran == -1


@pytest.mark.parametrize(("candidate", "offered", "unsound"), [(0, 0, -1), (5, 0, -1), (0, 1, 0), (2, 1, 0)])
def test_a_product_without_algorithms_is_refused(program, candidate, offered, unsound):
    failure, off_the_list, _, ran, *_ = ask(program, candidate, offered, unsound)
    assert failure.startswith("cuBLASLt has no algorithm for this product (NOT_SUPPORTED)")
    assert not off_the_list and ran == -1


def test_less_aligned_operands_take_the_first_of_their_own_list(program):
    assert ask(program, 3, 7, address=LESS_ALIGNED) == ("", False, 1, 200, 1, True)


def test_operands_are_described_as_they_lie(program):
    """cuBLASLt is column-major: d (16, 32) is its (32, 16), and its A is our b.

    FP8 is contiguous along k = 48, 16 bits are not.
    """
    for option, described in (
        ([], "1 0 2  32 16 32  48 32 48  48 16 48"),
        (["first"], "0 1 0  32 16 32  32 48 32  16 48 16"),
    ):
        arguments = [program, "0", "1", "-1", str(ALIGNED), *option]
        finished = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert finished.stdout.splitlines()[2].split() == described.split()
