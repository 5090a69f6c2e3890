"""Two versions side by side (benchmarks/same_bits.py): what it compares, and that it notices one bit."""

import pathlib

import numpy as np
import pytest

RUN = {"model": "tiny", "equal_steps": 3, "same_state": True, "capture": "a"}
ALL = [{**RUN, "version": version} for version in ("before", "before", "after", "after")]


@pytest.fixture
def same_bits(benchmark):
    return benchmark("same_bits")


@pytest.mark.parametrize("model", ["124m", "1.3b", "llama", "moe", "tiny"])
def test_no_token_stands_twice_in_a_batch(same_bits, model):
    for step in (0, 7, 49):
        read = np.asarray(same_bits.tokens_of(same_bits.Job(model, 50, "xla"), step))[:, :-1]
        assert np.unique(read).size == read.size
        assert read.shape == same_bits.MODELS[model][1:] and read.max() < same_bits.MODELS[model][0].vocab_size


@pytest.mark.parametrize(
    ("number", "change", "sentence"),
    [
        (None, {}, None),
        (2, {"equal_steps": 1}, "tiny: the versions differ after 1 steps"),
        (3, {"same_state": False}, "tiny: the versions differ after 3 steps"),
        (1, {"equal_steps": 0}, "tiny: two runs of one version differ, so nothing is said of the other"),
        (2, {"capture": "b"}, "tiny: the capture reports differ"),
        (2, {"failed": "no memory"}, "tiny: after failed: no memory"),
    ],
)
def test_it_says_what_is_not_the_same(same_bits, number, change, sentence):
    found = [run | change if i == number else run for i, run in enumerate(ALL)]
    assert same_bits.failures(found, steps=3) == ([sentence] if sentence else [])


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_one_bit_of_one_weight_is_noticed(same_bits, planted):
    here = pathlib.Path(__file__).parents[2]
    job = same_bits.Job("tiny", steps=3, attention="xla", planted=planted)
    found = same_bits.compare(job, {"before": here, "after": here}, lambda run: None)
    assert [run["equal_steps"] for run in found[:2]] == [3, 3] and found[1]["same_state"]
    assert bool(same_bits.failures(found, steps=3)) == planted
