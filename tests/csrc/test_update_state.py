"""csrc/update_state.cu on the CPU, bit for bit against NumPy: every row of every leaf, and nothing beside them."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import reference
from emulation import ORDERS, EmulationError, InPlace, Result, compile_for_cpu, planted
from reference import assert_same_bits

ENTRY = """
#include <vector>

// Per leaf: pointers to scale and history; rows and length.
extern "C" int update_state(const float* recorded, jax_fp8::StateCounts* counts, int64_t leaf_count,
                            float* const* arrays, const int64_t* numbers, int64_t forward, int64_t backward,
                            double headroom, int64_t most_recent, int64_t forget_outliers) {
  using namespace jax_fp8;
  std::vector<StateLeaf> leaves;
  for (int i = 0; i < leaf_count; ++i) leaves.push_back({arrays[2 * i], arrays[2 * i + 1], numbers[2 * i],
                                                         numbers[2 * i + 1]});
  const UpdateRule rule{static_cast<Fp8Type>(forward), static_cast<Fp8Type>(backward), static_cast<float>(headroom),
                         most_recent != 0, forget_outliers != 0};
  return launch_update_state({leaves.data(), static_cast<int>(leaf_count), recorded, counts, rule}, nullptr);
}
"""
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FORMATS = [E4M3, E5M2]  # in the order of Fp8Type
FILE, TABLE = "update_state.cu", 512  # leaves of a launch
SMALL_TABLE = (FILE, f"kTableLeaves = {TABLE}", "kTableLeaves = 2")


@dataclass(frozen=True)
class Rule:
    """How scales follow from amaxes, in the oracle's words."""

    dtypes: tuple = (E4M3, E4M3, E5M2)
    margin: int = 0
    algorithm: str = "max"
    forget_outliers: bool = False


RULES = {
    "max": Rule(),
    "most_recent": Rule(algorithm="most_recent"),
    "margin": Rule(margin=3),
    "largest": Rule(margin=120),
    "no smaller": Rule(margin=-160),
    "e4m3": Rule((E4M3,) * 3),
    "forget outliers": Rule(forget_outliers=True),
    "forget outliers, with a margin": Rule(margin=3, forget_outliers=True),
    "forget outliers, most recent": Rule(algorithm="most_recent", forget_outliers=True),
    "e5m2 forward": Rule((E5M2, E5M2, E4M3)),
}


def amaxes(rng, *shape) -> np.ndarray:
    """Of every size a float has, subnormal ones included."""
    return np.exp2(rng.uniform(-149, 127, shape)).astype(np.float32)


def staged(rng, *shape) -> np.ndarray:
    """Those of a step in which some tensors did not run and some were not finite."""
    special = rng.choice(np.float32([0, 0, np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.5, special, amaxes(rng, *shape))


def state(leaves, seed=0):
    """Recorded amaxes of all leaves; scale and history of each; `leaves` are their (rows, length)."""
    rng = np.random.default_rng(seed)
    scales, histories = [], []
    for rows, length in leaves:
        history = amaxes(rng, rows, length)
        history[:, 0] = staged(rng, rows)
        scales.append(amaxes(rng, rows))
        histories.append(history)
    return staged(rng, sum(rows for rows, _ in leaves)), scales, histories


def update(recorded, scales, histories, rule=RULES["max"], changes=(), orders=tuple(ORDERS)):
    """The counts, then scale and history of every leaf."""
    arrays = [InPlace(array) for leaf in zip(scales, histories, strict=True) for array in leaf]
    return compile_for_cpu(FILE, ENTRY, changes).call(
        *("update_state", recorded, Result((2,), np.int32), len(scales), arrays),
        np.array([history.shape for history in histories], np.int64),
        *(FORMATS.index(rule.dtypes[row]) for row in (0, 2)),
        float(np.ldexp(np.float32(1), rule.margin)),
        rule.algorithm == "most_recent",
        rule.forget_outliers,
        orders=orders,
    )


def oracle(recorded, scales, histories, rule=RULES["max"]):
    """`reference.update_state` of every GEMM."""
    updated, counts, remaining = [], np.zeros(2, np.int32), iter(recorded)
    for scale, history in zip(scales, histories, strict=True):
        scale, history = scale.copy(), history.copy()
        for row in range(len(scale)):
            history[row, 0] = np.maximum(history[row, 0], next(remaining))
        counts += reference.count_amaxes(history[:, 0], scale, rule.dtypes)
        for row in range(0, len(scale), 3):
            gemm = slice(row, row + 3)
            results = reference.update_state(
                scale[gemm], history[gemm], rule.dtypes, rule.margin, rule.algorithm, rule.forget_outliers
            )
            scale[gemm], history[gemm] = results
        updated += [scale, history]
    return [counts, *updated]


def check(leaves, rule=RULES["max"], seed=0, **how):
    given = state(leaves, seed)
    wanted = oracle(*given, rule)
    assert np.all(wanted[0] > 0) or len(given[0]) < 18
    for got, expected in zip(update(*given, rule, **how), wanted, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 255, 256, 257, 1023, 1024, 1025, 2049])
def test_every_length_of_history(length):
    check([(3, length), (12, length)], seed=length)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule(rule):
    check([(30, 4), (3, 7)], rule)


def test_more_leaves_than_a_launch_takes():
    """In small blocks, which a CPU is through with sooner."""
    small_blocks = (FILE, "kThreads = 256", "kThreads = 32")
    check([(3, 1 + number % 3) for number in range(TABLE + 2)], changes=(small_blocks,), orders=("random",))


def test_leaves_of_all_kinds_in_launches_of_two():
    """Stacked ones, empty ones, and histories of different lengths."""
    check([(3, 5), (6, 1030), (0, 2), (3, 2), (0, 9), (12, 300)], changes=(SMALL_TABLE,))


@pytest.mark.parametrize("leaves", [[], [(0, 8)]])
def test_no_row_leaves_the_count_at_zero(leaves):
    counts, *arrays = update(*state(leaves))
    assert not counts.any() and len(arrays) == 2 * len(leaves)


@pytest.mark.parametrize("value", [0, np.inf, np.nan])
@pytest.mark.parametrize("place", ["history", "recorded"])
def test_a_row_that_did_not_run_is_left_exactly_as_it_was(value, place):
    recorded, (scale,), (history,) = state([(3, 5)])
    recorded[:], history[:, 0] = 0, 0
    (recorded if place == "recorded" else history[:, 0])[:] = value
    counts, new_scale, new_history = update(recorded, [scale], [history])
    history[:, 0] = 0
    assert_same_bits(new_scale, scale)
    assert_same_bits(new_history, history)
    assert list(counts) == [0 if value == 0 else 3, 0]


@pytest.mark.parametrize("place", [1, 700, 1024, 1500])
@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0, -np.inf])
def test_what_no_step_leaves_in_a_history_is_taken_as_the_reference_takes_it(value, place):
    recorded, (scale,), (history,) = state([(3, 1501)])
    recorded[:], history[:, 0] = 2, 1
    history[:, 1:] = np.exp2(np.random.default_rng(1).uniform(-9, 9, (3, 1500)))
    history[:, place] = value
    got = update(recorded, [scale], [history], orders=("forward",))
    for array, expected in zip(got, oracle(recorded, [scale], [history]), strict=True):
        assert_same_bits(array, expected)


# What is wrong then, and what notices it: "elements differ" is the comparison with NumPy.
MISTAKES = {
    "no barrier before the writes": ((FILE, "__syncthreads();  // what", "// what"), "order of threads"),
    "no barrier in the maximum": (
        (FILE, "  __syncthreads();\n#pragma unroll\n  for (int warp", "  for (int warp"),
        "order of threads",
    ),
    "one more than the history": ((FILE, "from < leaf.length", "from <= leaf.length"), "argument|order of threads"),
    "one more is written": (
        (FILE, "if (to < leaf.length &&", "if (to <= leaf.length &&"),
        "argument|order of threads",
    ),
    "the other format": ((FILE, "== kGemmRows - 1", "!= kGemmRows - 1"), "elements differ"),
    "not all of the history": (
        (FILE, "largest = larger_of(largest, moved[i] > limit ? staged : moved[i]);", ""),
        "elements differ",
    ),
    "recorded not seen": ((FILE, "larger_of(history[0], table.recorded[blockIdx.x])", "history[0]"), "elements differ"),
    "infinity runs": ((FILE, "&& staged < infinity", ""), "elements differ"),
    "slot 0 not cleared": ((FILE, "(ran || to == 0)", "ran"), "elements differ"),
    "the counts not cleared": ((FILE, "0, sizeof(StateCounts)", "0, 0"), "order of threads|elements differ"),
    "counted at the new scale": (
        (FILE, "leaf.scale[row], smallest", "scale_of(amax, format, table.rule), smallest"),
        "elements differ",
    ),
    "all outliers forgotten": ((FILE, "moved[i] > limit", "moved[i] > staged"), "elements differ"),
    "no outlier forgotten": ((FILE, "moved[i] > limit ? staged : moved[i]", "moved[i]"), "elements differ"),
    "one range for both formats": (
        (FILE, "format == Fp8Type::kE4M3\n                          ?", "true ?"),
        "elements differ",
    ),
    "the second launch reads the first's amaxes": ((FILE, "table_.recorded += rows_;", ""), "elements differ"),
    "a leaf forgotten": ((FILE, "<= row ? low", "< row ? low"), "elements differ|argument"),
}


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    with pytest.raises((EmulationError, AssertionError), match=sentence):
        for rule in (RULES["max"], RULES["forget outliers"]):
            leaves = [(3, 5), (6, 1030), (3, 2), (3, 300)]
            check(leaves, rule, changes=(change, SMALL_TABLE), orders=("forward", "backward"))
