"""csrc/device/adam_by_tile.cuh on the CPU, by what csrc/adam.cu makes of it: byte for byte against NumPy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from csrc.test_adam import ONE_KERNEL, check
from emulation import EmulationError, planted
from gpu import adam_check
from gpu.adam_check import BF16, F16, F32, FORMULAS, MOMENTS, TILED_SHAPES, U16, Draw, Mode, numbers_of_step

WITH_PARAM = [weight for weight in adam_check.WEIGHTS if weight[0] is not None and weight[2] is None] + [
    (F16, F16, None)
]


def draw(shapes=TILED_SHAPES, modes=adam_check.SHARED_MODES, formula=FORMULAS[0], seed=5):
    drawn = Draw(seed)
    leaves, shared = drawn.side_by_side(shapes, modes, formula)
    return leaves, [drawn.inputs(leaf, F32 if leaf.param.dtype == F32 else BF16) for leaf in leaves], shared


@pytest.mark.parametrize("formula", FORMULAS, ids=["power of two", "exact", "epsilon"])
@pytest.mark.parametrize(("adam_w_mode", "apply"), [(True, 1), (False, 1), (True, 0)])
def test_shapes(formula, adam_w_mode, apply):
    """Whole squares and cut ones, one leaf and several side by side, other leaves between them."""
    leaves, inputs, shared = draw(formula=formula)
    check(leaves, inputs, numbers_of_step(1, apply=apply), adam_w_mode, shared=shared)


@pytest.mark.parametrize("part", range(5))
def test_modes(part):
    """Moments and weights of every kind, and gradients in turn."""
    gradients = itertools.cycle([F32, BF16, F16])
    pairs = list(itertools.product(MOMENTS, WITH_PARAM))[part::5]
    modes = [Mode(next(gradients), *pair, decays=number % 7 != 0) for number, pair in enumerate(pairs)]
    drawn = Draw(part)
    shapes = itertools.cycle([(16, 144), (144, 16), (48, 48)])
    leaves, shared = [], []
    for mode in modes:
        (leaf, _), (cast,) = drawn.side_by_side([(next(shapes)[0], (next(shapes)[1],))], [mode], FORMULAS[part % 3])
        shared.append(replace(cast, leaves=(len(leaves),), rule=draw_rule(part)))
        leaves.append(leaf)
    inputs = [drawn.inputs(leaf, mode.gradient) for leaf, mode in zip(leaves, modes, strict=True)]
    check(leaves, inputs, numbers_of_step(1), part % 2 == 0, shared=shared)


def draw_rule(number):
    return draw(TILED_SHAPES[1:2], formula=FORMULAS[number % 3])[2][0].rule


@pytest.mark.parametrize("weight", [(F32, None, None), (BF16, F32, None), (BF16, U16, None), (F16, F16, None)])
def test_special_values(weight):
    """Every special gradient with every special master: a NaN says nothing to a scale, an infinity makes it 1."""
    special = np.array(adam_check.ORDINARY + adam_check.TIES + adam_check.TINY, np.float32)
    drawn = Draw(1)
    (leaf, _), shared = drawn.side_by_side([(48, (272,))], [Mode(F32, (F32, F32), weight)], FORMULAS[1])
    shape = leaf.mu.shape
    values = np.resize(np.repeat(special, len(special)), shape), np.resize(np.tile(special, len(special)), shape)
    master, gradient = (np.ascontiguousarray(x) for x in values)
    with np.errstate(all="ignore"):
        if weight[1] == U16:
            high, low = np.divmod(master.view(np.uint32), 2**16)
            leaf = replace(leaf, param=high.astype(np.uint16).view(BF16), master=low.astype(np.uint16))
        else:
            leaf = replace(leaf, **{"master" if weight[1] else "param": master.astype(weight[1] or weight[0])})
    inputs = [drawn.inputs(leaf, F32) | {"gradient": gradient}]
    check([leaf], inputs, numbers_of_step(0, rate=0), shared=shared)
    check([leaf], inputs, numbers_of_step(0), shared=shared)


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, 1e-40, 3e38])
def test_squares_of_one_value(value):
    leaves, inputs, shared = draw([(144, (144,))], [Mode(F32, (F32, F32), (F32, None, None))])
    same = np.full(leaves[0].param.shape, value, np.float32)
    leaves[0] = replace(leaves[0], param=same)
    check(leaves, inputs, numbers_of_step(0, rate=0), shared=shared)


def test_more_leaves_than_a_launch_holds():
    leaves, inputs, shared = draw([(16, (16,))] * 280, [Mode(F32, (F32, F32), (F32, None, None))])
    check(leaves, inputs, numbers_of_step(2), shared=shared)


BY_TILE = "device/adam_by_tile.cuh"
READ = "__syncthreads();  // what was staged has been read"
PUT = "put_patch(staged, round, rows[round]);"
WARP = "bits = max(bits, warp_maxima[warp])"
LARGEST = "largest = fmaxf(largest, fabsf(p[c]))"
AMAX = "merge_amax<kTileThreads>(amax, leaf.amax);"
SCALES_T = "scales_t[int64_t{square_col} * squares.scales_t_stride + square_row]"
SCALES = "scales_t[int64_t{square_row} * squares.scales_stride + square_col]"
ROUNDED = "if (param != Storage::kFloat32) unpack_words(param, words, p);"
MISTAKES = {
    "the transpose is put where weights are still read": ((BY_TILE, READ, ""), "order of threads"),
    "the transpose is stored before it is there": (
        (BY_TILE, f"{PUT}\n  __syncthreads();", PUT),
        "order of threads",
    ),
    "the maximum of a warp": ((BY_TILE, WARP, "bits = warp_maxima[threadIdx.x / kWarp]"), None),
    "a NaN in the scale": ((BY_TILE, LARGEST, "largest = amax_of(largest, p[c])"), None),
    "the amax of the last square": ((BY_TILE, AMAX, f"{AMAX} *leaf.amax = amax;"), None),
    "an amax that is never zero": (("adam.cu", "*table.amax[slot] = 0.0f", ""), None),
    "the scales of values_t as those of values": ((BY_TILE, SCALES_T, SCALES), None),
    "weights before they are rounded": (("device/adam.cuh", ROUNDED, ""), None),
    "the squares of another leaf": ((BY_TILE, "table.squares[slot]", "table.squares[0]"), None),
}


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    leaves, inputs, shared = draw([(144, (128, 144)), (272, (272,))], formula=FORMULAS[1])
    leaves[0].param[3, 5] = np.nan
    with pytest.raises(EmulationError if sentence else (EmulationError, AssertionError), match=sentence):
        check(leaves, inputs, numbers_of_step(0), changes=(change, *ONE_KERNEL), shared=shared)
