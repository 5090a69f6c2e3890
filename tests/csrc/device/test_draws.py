"""csrc/device/draws.cuh on the CPU: what shards of leaves draw, against NumPy."""

import itertools

import numpy as np
import pytest
from csrc.test_adam import draw_leaves, update
from gpu import adam_check
from gpu.adam_check import assembled, bare, numbers_of_step
from gpu.kernel_check import Report

from jax_fp8.kernels.draws import Place

# A shard's shape, the whole leaf's, and the coordinates of the shard's first element.
SHARDS = {
    "rows": ((48, 32), (192, 32), (96, 0)),
    "columns": ((48, 32), (48, 96), (0, 64)),
    "rows and columns": ((144, 80), (288, 160), (144, 80)),
    "columns that vectors cross": ((33, 5), (66, 15), (33, 10)),
    "single columns": ((33, 1), (33, 4), (0, 3)),
    "the middle": ((3, 5, 7), (3, 10, 7), (0, 5, 0)),
    "all three": ((3, 5, 7), (6, 10, 28), (3, 5, 14)),
    "beyond 2**32": ((48, 32), (2**25, 256), (2**25 - 48, 224)),
    "around 2**32": ((4, 6), (2**31, 6), (715827880, 0)),
    "a long one": ((1001,), (2**32 - 1,), (2**32 - 1002,)),
}


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


def whole_index(shape, place) -> np.ndarray:
    """Of every element of a shard, in NumPy's integers of 64 bits."""
    index = np.zeros(shape, np.uint64)
    for dim, (first, size) in enumerate(zip(place.first, place.whole, strict=True)):
        coordinate = np.arange(shape[dim], dtype=np.uint64) + np.uint64(first)
        index = index * np.uint64(size) + np.expand_dims(coordinate, [*range(1, len(shape) - dim)])
    return index
