"""Every handler of csrc/module.cc with right and wrong calls."""

import collections
import dataclasses
import random

import numpy as np
import pytest
from emulation import planted
from emulation.compiler import CSRC

from handlers import (
    VIOLATIONS,
    Buffer,
    Call,
    build,
    contracts,
    has_memory,
    has_sanitizers,
    message_of,
    mutations,
    operation_of,
    run,
    targets,
)
from handlers.calls import F32
from handlers.contracts import PARAM, AdamCall

pytestmark = pytest.mark.skipif(not has_sanitizers(), reason="needs GCC 11 or newer with AddressSanitizer and UBSan")

CONTRACTS = contracts()
OPERATIONS = {operation_of(target) for target in targets()}
FEW = {"gemm", "weight_gradient", "adam"}  # whose handlers compute most of what arrives
MANY, PAIRS = 500, 20  # wrong calls of one right call beyond the first, and of those in which two things differ


def first(target: str) -> Call:
    return CONTRACTS[f"jax_fp8_{target}"][0]


def wrong_calls(target: str) -> list[tuple[str, Call]]:
    """All of the first right call, a sample of each other."""
    chooser, found = random.Random(target), []
    for number, call in enumerate(CONTRACTS[target]):
        made = list(mutations(call, number, PAIRS))
        found += made if number == 0 else chooser.sample(made, min(len(made), MANY // len(CONTRACTS[target])))
    return found


def faults_of(tried: list[tuple[str, Call]], outcomes: list[str]) -> list[str]:
    """What no call may come to."""
    faults = []
    for (what, call), outcome in zip(tried, outcomes, strict=True):
        kind = outcome.split()[0]
        if kind in VIOLATIONS:
            faults.append(f"{call.target}, {what}: {outcome}")
        elif kind == "error" and not is_a_sentence(message_of(outcome)):
            faults.append(f"{call.target}, {what}: must be one sentence, got {outcome}")
    return faults


def is_a_sentence(message: str) -> bool:
    """Of our own words; XLA says itself which attribute or how many operands a call lacks."""
    text = message.removesuffix(".")
    return not message.startswith("jax_fp8") or (". " not in text and "\n" not in text and 20 < len(text) < 700)


# ---- a part of it for every run -------------------------------------------------------------------------------------


def test_every_target_has_right_calls():
    names = (CSRC / "module.cc").read_text().count('table["jax_fp8_') - 2  # two states have a row of their own
    assert set(CONTRACTS) == set(targets()) and len(targets()) == names == 29
    assert sum(len(stages) for stages in targets().values()) == 33  # handlers


def test_right_calls_are_taken():
    calls = [call for target, found in CONTRACTS.items() if operation_of(target) in FEW for call in found]
    assert set(run(build(FEW), calls)) == {"ok"}


@pytest.mark.slow
def test_chains_call_their_links():
    calls = CONTRACTS["jax_fp8_chain"]
    assert set(run(build({"chain"}), calls)) == {"ok"}
    two = calls[1]
    without_norm = {name: value for name, value in two.attributes["link_0000"].items() if name != "norm"}
    wrong = [two.having(targets="jax_fp8_few_rows_gemm jax_fp8_adam"), two.having(targets="jax_fp8_few_rows_gemm")]
    wrong.append(two.having(link_0000=without_norm))
    told = [message_of(outcome) for outcome in run(build({"chain"}), wrong)]
    assert told[0] == "jax_fp8_chain: targets must be kernels that can be links, got jax_fp8_adam"
    assert told[1] == "jax_fp8_chain: arrays must end with the last link"
    assert "Wrong number of attributes" in told[2], "the link's own handler refuses"


def shared(*places: tuple[int, int], cols: int = 48) -> Call:
    """Leaves of 16 columns with these places in casts that are shared, of which there is one."""
    step = AdamCall().cast(16, cols)
    for place in places:
        step.leaf((16, 16), PARAM, place=place)
    return dataclasses.replace(step.call(), target="jax_fp8_adam")


def without_last(call: Call, count: int) -> Call:
    return call.with_buffers(call.operands[:-count], call.results[:-count])


# As many arrays too few as one shared cast has: with -1 of them, a sum of lengths that is right.
TOO_FEW = without_last(shared((-1, 0), (-1, 0), (-1, 0)), 8)
ALL = shared((0, 0), (0, 16), (0, 32))
GEMM_PART = CONTRACTS["jax_fp8_gemm"][2]  # columns 128 to 160 of 256
ONE_MORE = Buffer(F32, (16, 24))
LAST = 2**63 - 16

REFUSALS = [
    (
        GEMM_PART.having(first_column=np.int64(first_column)),
        "jax_fp8_gemm: b must have 32 rows from first_column on, a multiple of 16, here "
        f"{first_column}, got float8_e4m3fn[256, 272]",
    )
    for first_column in (LAST, -16, 240, 2**62, -(2**63), 8)
]
REFUSALS += [
    (first("gemm").having(alpha=np.float32("nan")), "jax_fp8_gemm: alpha must be a finite number, got nan"),
    (first("gemm").having(candidate=np.int32(-1)), "jax_fp8_gemm: candidate must be from 0 to 15, got -1"),
    (
        first("gemm").having(candidate=np.int32(2**31 - 1)),
        "jax_fp8_gemm: candidate must be from 0 to 15, got 2147483647",
    ),
    (
        first("weight_gradient").with_buffers(
            [*first("weight_gradient").operands, ONE_MORE], first("weight_gradient").results
        ),
        "jax_fp8_weight_gradient: must be called with dy, x and at most one total, got 4 arguments",
    ),
    (
        dataclasses.replace(
            first("weight_gradient"), operands=(Buffer(16, (3, 2**62)), *first("weight_gradient").operands[1:])
        ),
        "jax_fp8_weight_gradient: dy must have no negative dim, and at most 2**42 elements, got bfloat16[3, "
        "4611686018427387904]",
    ),
    (
        dataclasses.replace(
            first("weight_gradient"),
            operands=(Buffer(16, (3, 16), placed=False), *first("weight_gradient").operands[1:]),
        ),
        "jax_fp8_weight_gradient: dy must have an address, got bfloat16[3, 16]",
    ),
    (TOO_FEW.having(shared_casts=np.int32(-1)), "jax_fp8_adam: shared_casts must be 0 or more, got -1"),
    (ALL.having(shared_casts=np.int32(-1)), "jax_fp8_adam: shared_casts must be 0 or more, got -1"),
    (ALL.having(shared_casts=np.int32(-(2**31))), "jax_fp8_adam: shared_casts must be 0 or more, got -2147483648"),
    (
        ALL.having(shared_casts=np.int32(2**31 - 1)),
        "jax_fp8_adam: the call must have the arrays of its layout, 8589934604 operands and 8589934597 results, got 20 "
        "operands and 13 results",
    ),
    (
        ALL.having(first_leaf=np.int32(-1)),
        "jax_fp8_adam: first_leaf must be 0 or more and leave room for 3 leaves below 2**31, got -1",
    ),
    (
        ALL.having(first_leaf=np.int32(2**31 - 1)),
        "jax_fp8_adam: first_leaf must be 0 or more and leave room for 3 leaves below 2**31, got 2147483647",
    ),
    (
        ALL.having(layout=np.array([1, 1, 129], np.int32)),
        "jax_fp8_adam: layout must be made of the bits 1 to 64, got 129",
    ),
    (
        ALL.having(layout=np.array([1, 1, -1], np.int32)),
        "jax_fp8_adam: layout must be made of the bits 1 to 64, got -1",
    ),
    (
        ALL.having(shared_cast=np.array([0, 0], np.int32)),
        "jax_fp8_adam: shared_cast and first_column must have a number per leaf, 3, got 2 and 3",
    ),
    (
        shared((0, 0), (1, 16), (0, 32)),
        "jax_fp8_adam: shared_cast must be -1 or the number of one of the call's 1 shared casts, got 1",
    ),
    (
        shared((0, 0), (-2, 16), (0, 32)),
        "jax_fp8_adam: shared_cast must be -1 or the number of one of the call's 1 shared casts, got -2",
    ),
    (
        shared((0, 0), (-1, 16), (0, 32)),
        "jax_fp8_adam: first_column must be 0 for a leaf without a shared cast, got 16",
    ),
    (
        shared((0, 0), (0, 16), (0, 2**31 - 16)),
        "jax_fp8_adam: g of leaf 2 must lie within its shared cast and begin at a column divisible by 16, "
        "got float32[16, 16]",
    ),
    *(
        (
            shared(*places),
            "jax_fp8_adam: the leaves of shared cast 0 must have all of its 48 columns, and each column one leaf",
        )
        for places in ([(0, 0), (0, 16)], [(0, 0), (0, 16), (0, 16)], [(0, 16), (0, 32)], [])
    ),
    (ALL.having(margin=np.int32(127)), "jax_fp8_adam: margin must be from -126 to 126, got 127"),
    (
        ALL.having(amax_epsilon=np.float32("nan")),
        "jax_fp8_adam: amax_epsilon must be a finite number that is not negative, got nan",
    ),
]


def test_wrong_numbers_are_refused():
    outcomes = run(build(FEW), [ALL, GEMM_PART, *(call for call, _ in REFUSALS)])
    assert outcomes[:2] == ["ok", "ok"]
    told = [message_of(outcome) if outcome.startswith("error") else outcome for outcome in outcomes[2:]]
    assert told == [sentence for _, sentence in REFUSALS]


# What a handler may get wrong, by the target that then does what none may.
MISTAKES = {
    "a sum that wraps": (
        (
            "gemm.cc",
            "lies_within(buffers.first_column, n, all)",
            "buffers.first_column >= 0 && buffers.first_column + n <= all",
        ),
        "jax_fp8_gemm",
    ),
    "a shape unchecked": (
        ("grouped_gemm.cc", '.shape("starts", buffers.starts, {sum_of(groups, 1)})', ""),
        "jax_fp8_grouped_gemm",
    ),
    "no address": (("ffi.h", "if (!placed)", "if (false)"), "jax_fp8_amax"),
    "a part of any length": (
        ("chain.cc", "if (!lies_within(first, bytes, all))", "if (!lies_within(first, 0, all))"),
        "jax_fp8_chain",
    ),
    "an operand that there is not": (("chain.cc", "index < list.size()", "true"), "jax_fp8_chain"),
    "dims behind the last number": (("chain.cc", "if (!numbers.has(rank))", "if (false)"), "jax_fp8_chain"),
    "an element past the end": (("scale_source_ffi.h", "rule.row < count_of(source)", "true"), "jax_fp8_quantize"),
}


@pytest.mark.parametrize("name", planted(MISTAKES))
def test_planted_mistakes_are_found(name):
    change, target = MISTAKES[name]
    tried = wrong_calls(target)[:1200]
    outcomes = run(build({operation_of(target)}, (change,)), [call for _, call in tried], stops=True)
    assert faults_of(tried[: len(outcomes)], outcomes)


# ---- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(CONTRACTS))
def test_wrong_calls(target, record_property):
    program = build(OPERATIONS)
    assert set(run(program, CONTRACTS[target])) == {"ok"}
    tried = wrong_calls(target)
    outcomes = run(program, [call for _, call in tried])
    counts = collections.Counter(outcome.split()[0] for outcome in outcomes)
    record_property("calls", f"{target}: {len(tried)} calls, {counts['error']} refused")
    print(f"{target}: {len(tried)} calls, {counts['error']} refused")
    assert faults_of(tried, outcomes) == []
    assert counts["error"] > 0
    if target != "jax_fp8_uninitialized":  # which takes any results, and does nothing
        assert counts["error"] > len(tried) / 3
        huge = [outcome for outcome, (_, call) in zip(outcomes, tried, strict=True) if not has_memory(call)]
        assert sum(outcome == "ok" for outcome in huge) <= len(huge) / 5
