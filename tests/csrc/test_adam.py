"""csrc/adam.cu on the CPU: every mode of `gpu/adam_check.py`, byte for byte against its oracle in NumPy."""

import itertools
import os
import pathlib
import re
import shutil
import subprocess
from dataclasses import replace

import jax
import numpy as np
import pytest
from emulation import EmulationError, InPlace, compile_for_cpu, planted
from gpu import adam_check
from gpu.adam_check import (
    BF16,
    F32,
    MOMENTS,
    WEIGHTS,
    Draw,
    Mode,
    assembled,
    bare,
    numbers_of_step,
    rounded,
    shared_by_oracle,
)
from gpu.kernel_check import Report

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.draws import Place, place_words
from jax_fp8.kernels.shared_cast import places

ENTRY = """
#include <vector>

// Per leaf: pointers to g, mu, nu, param, master, values, values_t, amax, scale, mu_scale, nu_scale; and the numbers
// behind them. Per shared cast: pointers to values, values_t, amax, scale and, by tile, scale_t, else null.
extern "C" int adam(const float* scalars, const float* scales, const uint32_t* seed, const uint32_t* places,
                    int64_t adam_w_mode, int64_t first_leaf, int64_t leaf_count, void* const* arrays,
                    const int64_t* numbers, void* const* casts, int64_t margin, double amax_epsilon,
                    int64_t power_2_scale) {
  using namespace jax_fp8;
  std::vector<AdamEntry> entries;
  for (int i = 0; i < leaf_count; ++i, arrays += 11, numbers += 12) {
    const auto storage = [&](int number) { return static_cast<Storage>(numbers[number]); };
    const auto scalar = [&](int number) { return static_cast<float*>(arrays[number]); };
    const auto bytes = [&](int number) { return static_cast<uint8_t*>(arrays[number]); };
    const auto rows = static_cast<int32_t>(numbers[0]), stride = static_cast<int32_t>(numbers[11]);
    AdamLeaf leaf{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], bytes(5), bytes(6), scalar(7),
                  numbers[1], rows, stride, storage(2), storage(3), storage(4), storage(5), storage(6), storage(7),
                  numbers[8] != 0};
    float* scale = scalar(8);
    AdamSquares squares{};
    if (const int64_t cast = numbers[9], first = numbers[10]; cast >= 0) {
      void* const* own = casts + 5 * cast;
      leaf.values = static_cast<uint8_t*>(own[0]) + first;
      leaf.values_t = static_cast<uint8_t*>(own[1]) + first * rows;
      leaf.amax = static_cast<float*>(own[2]);
      float* const of_cast = static_cast<float*>(own[3]);
      if (own[4] != nullptr) {
        const int32_t down = (rows + kTile - 1) / kTile, across = (stride + kTile - 1) / kTile;
        squares = {of_cast + first / kTile, static_cast<float*>(own[4]) + first / kTile * down, across, down};
      } else if (first == 0) {
        scale = of_cast;
      }
    }
    entries.push_back({leaf, {scale, scalar(9), scalar(10)}, squares});
  }
  const auto count = static_cast<int>(leaf_count), first = static_cast<int>(first_leaf);
  const TileRule rule{true, true, static_cast<int32_t>(margin), static_cast<float>(amax_epsilon), power_2_scale != 0};
  return launch_adam({scalars, scales, seed, places, entries.data(), count, first, adam_w_mode != 0, rule}, nullptr);
}
"""
# In the order of Storage; uint16 is a remainder.
STORAGES = ["none", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint16"]


def storage(array) -> int:
    return 0 if array is None else STORAGES.index(np.dtype(array.dtype).name)


def values_and_scale(array):
    return (array.values, array.scale) if isinstance(array, Fp8Array) else (array, None)


def update(leaves, shared, inputs, coefficients, seed, adam_w_mode, changes=(), first_leaf=0, whereabouts=None):
    """What `adam_check.update_shared` does, in the emulation."""
    shapes = [row["gradient"].shape for row in inputs]
    whole = list(map(Place.of_all, shapes)) if whereabouts is None else whereabouts
    arrays, numbers, scales = [], [], []
    of_leaves = places([cast.leaves for cast in shared], [row["gradient"].shape for row in inputs])
    for leaf, place in zip(map(assembled, leaves, inputs), of_leaves, strict=True):
        cast = shared[place.cast] if place.cast >= 0 else None
        (mu, mu_scale), (nu, nu_scale) = values_and_scale(leaf.mu), values_and_scale(leaf.nu)
        values, values_t, scale, amax = leaf.cast.arrays if leaf.cast else (None,) * 4
        changed = [
            mu,
            nu,
            leaf.param,
            leaf.master,
            values,
            values_t,
            amax,
            scale,
            mu_scale,
            nu_scale,
        ]
        arrays += [
            np.asarray(leaf.gradient),
            *(None if array is None else InPlace(np.asarray(array)) for array in changed),
        ]
        transposed = values_t is not None or cast is not None
        numbers.append([*(leaf.gradient.shape if transposed else (1, leaf.gradient.size)), storage(leaf.gradient)])
        stride = 0 if cast is None else cast.pair.rowwise.shape[1]
        values = values if cast is None else cast.pair.rowwise
        numbers[-1] += [*map(storage, (mu, nu, leaf.param, leaf.master, values)), leaf.decays, *place, stride]
        row = [
            leaf.scale if cast is None or cast.rule else cast.scale,
            mu_scale,
            leaf.mu_scale,
            nu_scale,
            leaf.nu_scale,
        ]
        scales.append([1 if scale is None else scale for scale in row])
    scalars = np.array(list(vars(coefficients).values()), np.float32)
    casts = [
        None if array is None else InPlace(np.asarray(array))
        for values, values_t, scale, amax, *scale_t in (cast.arrays for cast in shared)
        for array in (values, values_t, amax, scale, *(scale_t or [None]))
    ]
    formula = shared[0].rule.formula if shared and shared[0].rule else ScaleFormula()
    results = iter(
        compile_for_cpu("adam.cu", ENTRY, changes).call(
            *(
                "adam",
                scalars,
                np.array(scales, np.float32),
                np.array(seed, np.uint32),
                np.array(place_words(shapes, whole)),
            ),
            *(adam_w_mode, first_leaf),
            *(len(leaves), arrays, np.array(numbers, np.int64), casts),
            *(formula.margin, float(formula.amax_epsilon), formula.power_2_scale),
        )
    )
    leaves = [updated(leaf, results) for leaf in leaves]
    return [*leaves, *(written_pair(cast, results) for cast in shared)]


def written_pair(cast, results):
    """The next pair, whose amax stands before its scale here."""
    values, values_t, amax, scale, *scale_t = (next(results) for _ in cast.arrays)
    return cast.pair_of(iter([values, values_t, scale, amax, *scale_t]))


def updated(leaf, results):
    """The leaf with what was changed in place, in the order of `update`."""

    def take(old):
        return None if old is None else next(results)

    (mu, mu_scale), (nu, nu_scale) = values_and_scale(leaf.mu), values_and_scale(leaf.nu)
    mu, nu, param, master = map(take, (mu, nu, leaf.param, leaf.master))
    cast = leaf.cast
    if cast is not None:
        values, values_t, scale, amax = cast.arrays
        values, values_t, amax, scale = map(take, (values, values_t, amax, scale))
        cast = Fp8Pair.with_shared_scale(values, values_t, scale, amax)
    mu_scale, nu_scale = take(mu_scale), take(nu_scale)
    moments = {
        "mu": mu if mu_scale is None else Fp8Array(mu, mu_scale),
        "nu": nu if nu_scale is None else Fp8Array(nu, nu_scale),
    }
    return bare(replace(leaf, **moments, param=param, master=master, cast=cast))


def check(leaves, inputs, coefficients, adam_w_mode=True, changes=(), shared=()):
    args = leaves, shared, inputs, coefficients, np.uint32(0x9E3779B9), adam_w_mode
    report = Report()
    adam_check.compare(report, "emulated", update(*args, changes=changes), shared_by_oracle(*args), "")
    assert report.passed["emulated"]
    assert not report.failures


def draw_leaves(modes, shapes, seed=0):
    draw = Draw(seed)
    leaves = [draw.leaf(next(shapes), mode) for mode in modes]
    return leaves, [draw.inputs(leaf, mode.gradient) for leaf, mode in zip(leaves, modes, strict=True)]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_modes(adam_w_mode):
    """Moments and weights of every kind, each pair once in the two halves together."""
    gradients = itertools.cycle([adam_check.F32, adam_check.BF16, adam_check.F16])
    pairs = list(itertools.product(MOMENTS, WEIGHTS))[int(adam_w_mode) :: 2]
    modes = [Mode(next(gradients), *pair, decays=number % 7 != 0) for number, pair in enumerate(pairs)]
    check(*draw_leaves(modes, itertools.cycle(adam_check.SMALL_SHAPES)), numbers_of_step(1), adam_w_mode)


@pytest.mark.parametrize("mode", adam_check.SIX_MODES)
def test_shapes(mode):
    """Nothing, less than a vector, tails of a vector and of a chunk, parts of a tile and more than one."""
    shapes = [(0,), (0, 16), (), (3,), (16385,), (16, 160), (144, 272)]
    check(*draw_leaves([mode] * len(shapes), iter(shapes), seed=1), numbers_of_step(0))


def test_more_leaves_than_a_launch_holds():
    modes = [adam_check.SIX_MODES[0]] * 340 + [adam_check.SIX_MODES[5]] * 3
    check(*draw_leaves(modes, itertools.cycle([(5,), (4,)]), seed=2), numbers_of_step(2))


def test_a_call_of_the_last_leaves_of_a_tree():
    """Values are rounded at random by the number of their leaf in the tree."""
    leaves, inputs = draw_leaves([adam_check.SIX_MODES[4]] * 3, itertools.repeat((16, 48)), seed=3)
    rest = numbers_of_step(1), np.uint32(7), True
    whole, report = update(leaves, (), inputs, *rest), Report()
    adam_check.compare(report, "in parts", update(leaves[1:], (), inputs[1:], *rest, first_leaf=1), whole[1:], "")
    assert report.passed["in parts"] and not report.failures
    adam_check.compare(report, "control", update(leaves[1:], (), inputs[1:], *rest), whole[1:], "counted anew")
    assert report.failures


@pytest.mark.parametrize("number", range(len(WEIGHTS)))
def test_special_values(number):
    """Every special gradient with every special master; subnormal ones too."""
    special = np.array(adam_check.ORDINARY + adam_check.TIES + adam_check.TINY, np.float32)
    gradient, master = (grid.reshape(-1) for grid in np.meshgrid(special, special))
    moments = MOMENTS[number % len(MOMENTS)]
    weight = WEIGHTS[number]
    draw = Draw(number)
    leaf = draw.leaf(gradient.shape, Mode(adam_check.F32, moments, weight))
    inputs = [draw.inputs(leaf, adam_check.F32) | {"gradient": gradient}]
    if weight[1] == adam_check.U16:
        high, low = np.divmod(master.view(np.uint32), 2**16)
        leaf = replace(leaf, param=high.astype(np.uint16).view(adam_check.BF16), master=low.astype(np.uint16))
    else:
        with np.errstate(all="ignore"):
            leaf = replace(leaf, **{"master" if weight[1] else "param": master.astype(weight[1] or weight[0])})
        if weight[0] and weight[1]:
            edited = np.arange(master.size) % 2 == 1
            leaf = replace(leaf, param=np.where(edited, rounded(gradient, weight[0]), rounded(leaf.master, weight[0])))
    for rate, grad_scale in ((0, 1), (1e-3, 0.37)):
        check([leaf], inputs, numbers_of_step(0, rate=rate, grad_scale=grad_scale))


def test_a_step_that_is_not_applied_writes_nothing():
    check(*draw_leaves(adam_check.SIX_MODES, itertools.cycle([(48, 32)])), numbers_of_step(1, apply=0))


def draw_side_by_side(shapes=adam_check.SHARED_SHAPES):
    draw = Draw(5)
    leaves, shared = draw.side_by_side(shapes, adam_check.SHARED_MODES)
    return leaves, [draw.inputs(leaf, F32 if leaf.param.dtype == F32 else BF16) for leaf in leaves], shared


@pytest.mark.parametrize(("adam_w_mode", "apply"), [(True, 1), (False, 1), (True, 0)])
def test_leaves_side_by_side(adam_w_mode, apply):
    """Two and three of several widths in one cast, other leaves between them."""
    leaves, inputs, shared = draw_side_by_side()
    check(leaves, inputs, numbers_of_step(1, apply=apply), adam_w_mode, shared=shared)


# The kernel that takes every leaf, and no other: a mistake is compiled sooner without them.
ONE_KERNEL = (
    ("adam.cu", "constexpr Kernel kKernels[] = {", "constexpr Kernel kKernels[] = {\n#if 0"),
    ("adam.cu", "    kernel<Unknown>(),", "#endif\n    kernel<Unknown>(),"),
)
ADAM, ROOTS, TABLE = "device/adam.cuh", "device/roots.cuh", "device/adam_table.cuh"
ROOT = "__fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(inverse, 0.5f), root)"
QUOTIENT = "__fmaf_rn(inverse, __fmaf_rn(-y, quotient, x), quotient)"
STEP = "__fsub_rn(p[i], __fmul_rn(s[kRate], u[i]))"
MISTAKES = {
    "no barrier": (("adam.cu", "__syncthreads();", ""), "order of threads"),
    "the swizzle is written only": (("device/tile.cuh", " ^ (group >> kWithin)]", "]"), "order of threads"),
    "roots as they are approximated": ((ROOTS, ROOT, "root"), None),
    "quotients as they are approximated": ((ROOTS, QUOTIENT, "quotient"), None),
    "one rounding less": ((ADAM, STEP, "__fmaf_rn(-s[kRate], u[i], p[i])"), None),
    "one draw for both moments": (("device/moments.cuh", "second_draw(draws[i])", "draws[i]"), None),
    "a param that was changed is not looked at": ((ADAM, "if (!likely(same))", "if (false)"), None),
    "the number of a leaf within its launch": (("adam.cu", "table.number[slot]", "slot"), None),
}  # fmt: skip
STRIDE = "(row + i) * leaf.values_stride"
SIDE_BY_SIDE_MISTAKES = {
    "rows as long as those of the leaf": (TABLE, STRIDE, "(row + i) * leaf.cols"),
    "rows one after the other": (TABLE, STRIDE, "row * leaf.values_stride + i * leaf.cols"),
    "the amax of the last leaf only": ("adam.cu", "merge_amax<kTileThreads>(amax, leaf.amax)", "*leaf.amax = amax"),
    "an amax that is never zero": ("adam.cu", "*table.amax[slot] = 0.0f", ""),
    "values where a leaf of its own has them": (ADAM, "leaf.values_stride == 0", "true"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    modes = [*adam_check.SIX_MODES, adam_check.SIX_MODES[1]]
    leaves, inputs = draw_leaves(modes, iter([(33,), (144, 80), (16, 16), (48, 48), (32, 32), (4, 4), (48, 272)]))
    with pytest.raises(EmulationError if sentence else AssertionError, match=sentence):
        check(leaves, inputs, numbers_of_step(0), changes=(change, *ONE_KERNEL))


@pytest.mark.parametrize("mistake", SIDE_BY_SIDE_MISTAKES)
def test_a_mistake_side_by_side_is_noticed(mistake):
    leaves, inputs, shared = draw_side_by_side(adam_check.SHARED_SHAPES[:2])
    changes = (SIDE_BY_SIDE_MISTAKES[mistake], *ONE_KERNEL)
    with pytest.raises((EmulationError, AssertionError)):
        check(leaves, inputs, numbers_of_step(0), changes=changes, shared=shared)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_compiler_spills_nothing(tmp_path):
    """What ptxas of CUDA 13.0 has put on the stack it was seen to take for the same in all threads of a warp: on a GPU
    a row of four of every cast was then wrong, which no emulation shows.
    """
    source = pathlib.Path(__file__).parents[2] / "csrc/adam.cu"
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", f"-I{jax.ffi.include_dir()}"]
    path = os.pathsep.join(of for of in os.environ["PATH"].split(os.pathsep) if "assembler" not in of)  # conftest.py's
    command += ["-o", str(tmp_path / "adam"), str(source)]
    told = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", told.stderr + told.stdout)
    assert len(frames) > 20 and set(frames) == {("0", "0")}
