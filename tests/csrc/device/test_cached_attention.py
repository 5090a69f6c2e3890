"""csrc/cached_attention.cu on the CPU: what it writes bit for bit, and the attention against float64."""

from dataclasses import replace

import numpy as np
import pytest
from new_tokens import attend, check, make, make_haystack, written
from reference import assert_same_bits, quantize
from token_attention import BFLOAT16, E4M3, FEW_SLOTS, MANY_SLOTS, NO_CLUSTERS, SCALES, SIXTEEN, run

CASES = {
    "float32": {"dtype": np.float32, "group": 1, "head_dim": 64},
    "bfloat16": {"group": 4, "head_dim": 128, "slots": 200, "prompt_slots": 150, "step": 30},
    "float16": {"dtype": np.float16, "group": 2, "head_dim": 80, "kv_heads": 3},
    "FP8": {"cache": E4M3, "group": 4, "head_dim": 128, "slots": 200, "prompt_slots": 150, "step": 30},
    "FP8 of one query": {"cache": E4M3, "group": 1, "head_dim": 64, "slots": 200, "prompt_slots": 150, "step": 45},
    "FP8 and float32": {"dtype": np.float32, "cache": E4M3, "group": 8, "head_dim": 24, "kv_heads": 2},
    "FP8 and float16": {"dtype": np.float16, "cache": E4M3, "group": 1, "head_dim": 128},
    "5 queries": {"group": 5, "head_dim": 48, "slots": 130, "prompt_slots": 120},
    "8 queries of 256 features": {"group": 8, "head_dim": 256},
    "16 queries": {"group": 16, "head_dim": 128, "batch": 1},
    "11 queries": {"group": 11, "head_dim": 64, "cache": E4M3, "batch": 1, "pairs": 4},
    "256 features in FP8": {"cache": E4M3, "group": 2, "head_dim": 256, "pairs": 128},
    "the first new token": {"step": 0, "group": 1},
    "a prompt of no token": {"step": 0, "lengths": [0, 0], "group": 4},
    "the last slot": {"step": 15, "slots": 40, "prompt_slots": 24, "lengths": [24, 23]},
    "no slots of prompts": {"prompt_slots": 0, "step": 12, "slots": 13, "lengths": [0, 0]},
    "rotated": {"pairs": 8, "head_dim": 16, "group": 4},
    "rotated, FP8": {"pairs": 32, "head_dim": 64, "cache": E4M3, "group": 1},
    "rotated partly": {"pairs": 10, "head_dim": 80, "dtype": np.float32},
    "rotated partly, FP8": {"pairs": 5, "head_dim": 64, "dtype": np.float16, "cache": E4M3},
    "a window of one": {"window": 1},
    "a window within new tokens": {"window": 3, "step": 9},
    "a window into the prompt": {"window": 12, "step": 4, "lengths": [24, 9], "cache": E4M3},
    "a window beyond all": {"window": 1000, "group": 4},
    "a cap": {"logit_cap": 1.5, "scale": 1.0, "group": 4},
    "a cap in float32": {"logit_cap": 30.0, "scale": 2.0, "dtype": np.float32},
}


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    problem = make(**CASES[case])
    check(problem, run(problem))


# With 1 to 16 blocks, more of them than slots, and without clusters.
@pytest.mark.parametrize("changes", [FEW_SLOTS, SIXTEEN, NO_CLUSTERS], ids=["8", "16", "none"])
@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_blocks_of_a_cluster(cache, changes):
    for lengths, step, slots in (([150], 30, 200), ([1], 0, 200), ([3], 1, 8), ([0], 0, 200)):
        prompt_slots = 150 if slots == 200 else 4
        shape = {"batch": 1, "lengths": lengths, "step": step, "slots": slots, "prompt_slots": prompt_slots}
        problem = make(cache=cache, group=3, head_dim=80, **shape)
        check(problem, run(problem, changes))


def test_which_slots_are_for_clusters():
    """Each power of two, by what the number of allocated slots is worth."""
    for slots in (127, 128, 256, 512):
        problem = make(batch=1, slots=slots, prompt_slots=100, lengths=[70], step=20)
        check(problem, run(problem))


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 5), (128, 3)])
def test_many_heads(cache, head_dim, kv_heads):
    """More heads than the device has blocks at once, each alone; a row of each length."""
    shape = {"slots": 140, "prompt_slots": 100, "lengths": [100, 1, 33], "step": 39}
    problem = make(cache=cache, batch=3, kv_heads=kv_heads, head_dim=head_dim, group=4, **shape)
    check(problem, run(problem))


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3, None])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (1, 56), (2, 128)])
def test_many_slots(cache, kv_heads, head_dim):
    """Blocks of many warps; None: of FP8 and float32."""
    shape = MANY_SLOTS | {"kv_heads": kv_heads, "head_dim": head_dim, "batch": 1, "pairs": 8, "cache": cache or E4M3}
    for lengths, step in (([1200], 50), ([13], 50), ([1195], 0), ([0], 3)):
        problem = make(BFLOAT16 if cache else np.float32, **shape | {"lengths": lengths, "step": step})
        check(problem, run(problem))


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
@pytest.mark.parametrize("slot", [0, 3333, 4095])
def test_a_needle_in_a_long_cache(cache, slot):
    """One slot of 4,096 decides, wherever it lies. Negative control: another slot's value is another result."""
    problem = make_haystack(slot, cache=cache, batch=1, group=3, head_dim=64, slots=4100, prompt_slots=4096, step=1)
    found = run(problem)
    check(problem, found)
    values = problem.values[0, 0].astype(np.float32) * (
        1 if problem.scales is None else problem.scales[1][0, 0][:, None]
    )
    for attended in found[0][0, 0].astype(np.float32):
        errors = np.abs(attended - values[:4096]).max(axis=1)
        assert errors.argmin() == slot and errors[slot] < 0.2 * np.abs(values[slot]).max()


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_equal_weights_of_a_long_cache(cache):
    """The mean of 4,096 values and one: sums of so many terms stay exact to float32."""
    problem = make(cache=cache, batch=1, group=2, head_dim=64, slots=4100, prompt_slots=4096, lengths=[4096], step=0)
    problem = replace(problem, scale=0.0)
    np.abs(problem.values, out=problem.values)
    check(problem, run(problem))


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_large_logits(cache):
    """A naive exponential overflows from 89 on; here a maximum rises from batch to batch, and falls in another row."""
    problem = make(cache=cache, group=2, head_dim=16, slots=300, prompt_slots=280, lengths=[280, 280], scale=1.0)
    rising = np.linspace(0, 8, 280)
    problem.keys[0, :, :280] = (problem.keys[0, :, :280].astype(np.float32) * rising[:, None]).astype(cache)
    problem.keys[1, :, :280] = (problem.keys[1, :, :280].astype(np.float32) * rising[::-1, None]).astype(cache)
    problem = replace(problem, query=(problem.query.astype(np.float32) * 30).astype(BFLOAT16))
    found = run(problem)
    for array, wanted in zip(found[1:], written(problem), strict=True):
        assert_same_bits(array, wanted)
    wanted, _ = attend(problem, written(problem))
    np.testing.assert_allclose(found[0].astype(np.float64), wanted, rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize("case", SCALES)
def test_scales_of_slots(case):
    """float16, in which the weights of values in FP8 are, has a narrower range than scales."""
    problem = SCALES[case]()
    check(problem, run(problem))


def test_what_is_not_finite():
    """A NaN that is seen spoils its head; rows that are not finite have the scale 1."""
    problem = make(cache=E4M3, kv_heads=2, group=2, head_dim=64, batch=2)
    problem.key[0, 0, 3], problem.key[0, 1, 60], problem.value[1, 0, 2] = np.nan, np.inf, -np.inf
    attended, keys, values, *scales = run(problem)
    expected = written(problem)
    for array, wanted in zip((keys, values, *scales), expected, strict=True):
        assert_same_bits(array, wanted)
    assert scales[0][0, :, problem.own].tolist() == [1, 1] and scales[1][1, 0, problem.own] == 1
    is_nan = np.isnan(attended.astype(np.float32))
    assert is_nan[0, 0].all() and not is_nan[1].any()


def test_numbers_out_of_range_count_as_the_nearest():
    problem = make(lengths=[24, 0], step=15)
    wrong = replace(problem, lengths=np.int32([2**31 - 1, -(2**31)]), step=2**31 - 1)
    for ours, other in zip(run(wrong), run(problem), strict=True):
        assert_same_bits(ours, other)
    problem = make(step=0)
    for ours, other in zip(run(replace(problem, step=-5)), run(problem), strict=True):
        assert_same_bits(ours, other)


@pytest.mark.parametrize("changes", [(), FEW_SLOTS], ids=["one block", "a cluster"])
@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_a_result_that_is_cast(cache, changes):
    """Exactly what the cast of the result is, by a scale that saturates some of it."""
    problem = make(cache=cache, group=2, head_dim=80, slots=200, prompt_slots=150, step=30)
    attended = run(problem, changes)[0]
    scale = np.float32(np.abs(attended.astype(np.float32)).max() / 500)
    found = run(problem, changes, attended_scale=scale)[0]
    expected = quantize(attended, E4M3, scale)[0]
    assert_same_bits(found, expected)
    assert len(np.unique(found.astype(np.float32))) > 50 and found.astype(np.float32).max() == 448
    with np.errstate(divide="ignore", invalid="ignore"):
        assert_same_bits(run(problem, changes, attended_scale=0.0)[0], quantize(attended, E4M3, np.float32(0))[0])


def test_no_rows():
    problem = make(batch=0, lengths=[])
    assert run(problem)[0].shape == (0, 1, 2, 16)


def test_another_formula_would_be_noticed():
    problem = make(pairs=8, window=9, logit_cap=2.0, scale=1.0)
    attended, *caches = run(problem)
    for wrong in (
        {"window": 8},
        {"window": 10},
        {"window": 0},
        {"logit_cap": 2.1},
        {"logit_cap": 0.0},
        {"scale": 1.01},
    ):
        with pytest.raises(AssertionError):
            check(replace(problem, **wrong), (attended, *caches))
    for other in (replace(problem, rotary=None), replace(problem, value=problem.key)):
        with pytest.raises(AssertionError):
            check(other, (attended, *caches))
