"""csrc/device/draws.cuh on the CPU: what shards of leaves draw, against NumPy."""

import itertools

import numpy as np
import pytest
from csrc.test_adam import draw_leaves, update
from gpu import adam_check
from gpu.adam_check import SHARDS, assembled, bare, numbers_of_step, whole_index
from gpu.kernel_check import Report

from jax_fp8.kernels.draws import Place


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_shards_draw_what_the_whole_draws(adam_w_mode):
    """Each element by its index in the whole leaf; leaves that are here as a whole between the shards."""
    modes = list(itertools.islice(itertools.cycle(adam_check.SIX_MODES[2:]), 2 * len(SHARDS)))
    places = [(shape, Place(tuple(map(np.uint32, first)), whole)) for shape, whole, first in SHARDS.values()]
    places = [place for shape, of_shard in places for place in ((shape, of_shard), (shape, Place.of_all(shape)))]
    leaves, inputs = draw_leaves(modes[int(adam_w_mode) :] + modes[: int(adam_w_mode)], (shape for shape, _ in places))
    rest = numbers_of_step(1), np.uint32(7), adam_w_mode
    got, report = update(leaves, (), inputs, *rest, whereabouts=[of_shard for _, of_shard in places]), Report()
    wanted = [
        bare(adam_check.oracle(assembled(leaf, row), *rest[:1], 7, number, adam_w_mode, whole_index(*place)))
        for number, (leaf, row, place) in enumerate(zip(leaves, inputs, places, strict=True))
    ]
    adam_check.compare(report, "shards", got, wanted, "")
    assert report.passed["shards"] and not report.failures
    adam_check.compare(report, "control", update(leaves, (), inputs, *rest), wanted, "counted from zero")
    assert len({failure.split("leaf ")[1] for failure in report.failures if ".mu" in failure or ".nu" in failure}) > 8
