"""The kernel of Adam on a GPU: bit for bit against NumPy and against the reference on the CPU, in every mode it has.

    python tests/gpu/adam_check.py --output adam_check.json      # about a minute on an H200
    python tests/gpu/adam_check.py --self-test                  # the reference against NumPy, small arrays, on a CPU

Steps follow each other on donated arrays, as in training. All NaNs count as equal; all other results are compared byte
for byte. Subnormal numbers, which XLA's CPU compiler flushes to zero, are compared with NumPy only, and only on a GPU.
Ends with one line per group of checks, and with exit code 1 if a check failed. `benchmarks/optimizer_step.py` measures
its speed.
"""

import itertools
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.kernel_check import E4M3, E5M2
from gpu.report import Report, Script, as_bytes, on_gpu, run_script

from jax_fp8.core.cast import SQUARE, Cast
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, tiles_of
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.adam import TARGET, adam, launches
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.draws import PLACE_WORDS, Place
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.kernels.shared_cast import SharedCast
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS


@dataclass(frozen=True)
class Mode:
    """The dtypes of a leaf, and whether it decays."""

    gradient: type
    moments: tuple
    weight: tuple
    decays: bool = True


F32, BF16, F16, U16 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint16
FP8 = (np.dtype(E4M3), np.dtype(E5M2))
EDITED = 5  # every fifth param was changed without its master
MOMENTS = tuple(itertools.product((F32, BF16, E4M3, E5M2), repeat=2))
WEIGHTS = (  # param, master, values
    (F32, None, None),
    (F32, None, E4M3),
    (F32, None, E5M2),
    (BF16, F32, None),
    (BF16, F32, E4M3),
    (BF16, F16, None),
    (BF16, F16, E5M2),
    (BF16, U16, None),
    (BF16, U16, E4M3),
    (F16, F32, None),
    (F16, F32, E5M2),
    (F16, F16, E4M3),
    (None, F32, E4M3),
    (None, F32, E5M2),
    (None, F16, E4M3),
    (None, F16, E5M2),
)
SMALL_SHAPES = ((48, 32), (33, 65), (16, 16), (144, 80), (7,), (8,), (), (1,), (3, 5, 7), (2, 16, 16), (1000,))
SHAPES = ((0,), (0, 16), (278011,), (8192,), (8193,), (4096, 1024), (16, 4096), (4112, 16), *SMALL_SHAPES)
LARGEST_SHAPE = (32320, 1024)
OVER_2_TO_31 = (2064, 2**20)

SIX_MODES = (
    Mode(F32, (F32, F32), (F32, None, None)),
    Mode(BF16, (F32, F32), (F32, None, E4M3)),
    Mode(BF16, (BF16, BF16), (BF16, U16, E4M3)),
    Mode(F16, (BF16, E5M2), (F16, F16, E4M3), decays=False),
    Mode(BF16, (E4M3, E4M3), (BF16, F32, E4M3)),
    Mode(F32, (E5M2, E5M2), (None, F16, E5M2)),
)

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

# Leaves side by side in a shared cast: their rows, and the columns of each leaf.
SHARED_SHAPES = ((144, (96, 32, 16)), (16, (128, 144)), (272, (16, 16, 16)), (128, (128, 256)))
LARGE_SHARED_SHAPES = ((4096, (4096, 1024, 1024)), (1024, (2816, 2816)))
SHARED_MODES = (
    Mode(F32, (F32, F32), (F32, None, None)),
    Mode(BF16, (F32, F32), (BF16, U16, None)),
    Mode(BF16, (E4M3, E4M3), (BF16, F32, None)),
    Mode(F16, (F32, BF16), (F16, F16, None), decays=False),
)

# The same with a scale for each square of 128 x 128: whole and cut squares, and several leaves in a row of squares.
TILED_SHAPES = ((144, (128, 48)), (16, (144,)), (272, (256, 128, 16)), (128, (128,)), (400, (272,)), (16, (16,)))
LARGE_TILED_SHAPES = ((4096, (4096, 1024, 1024)), (1024, (2816, 2816)), (4112, (1040,)))
FORMULAS = (ScaleFormula(power_2_scale=True), ScaleFormula(), ScaleFormula(margin=2, amax_epsilon=3.0))

# Ordinary in the sense that every intermediate result is a normal number, infinite or NaN; the ties are those of
# bfloat16, float16 and FP8.
ORDINARY = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-4, 3e38, -3.4e38, 65504.0, 65520.0, 447.9, -464.0)
TIES = (1 + 2**-8, -(1 + 3 * 2**-8), 1 + 2**-8 + 2**-23, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-4, 1 + 3 * 2**-4)
TIES += (3.3961775e38, 57344.0)
TINY = (1e-45, -1e-40, 1.1754942e-38, 2**-126, -1e-30, 1e-20, 2**-24, 2**-25, 3 * 2**-26, 2**-9, -(2**-10), 2**-16)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def oracle(leaf: Leaf, c: Coefficients, seed: int, number: int, adam_w_mode: bool, index=None) -> Leaf:
    """The updated leaf, its arrays flat, in NumPy's float32, which rounds after every operation. `index` is that of
    every element in the whole leaf, where this is a shard.
    """
    if c.apply == 0:
        return leaf
    second = np.square(wide(leaf.nu)) if isinstance(leaf.nu, Fp8Array) else wide(leaf.nu)
    arrays = wide(leaf.gradient), oracle_master(leaf), wide(leaf.mu), second
    m, v, p, _ = reference.adam(*arrays, vars(c), leaf.decays, adam_w_mode)
    index = np.arange(p.size, dtype=np.uint64) if index is None else index.reshape(-1)
    draws = reference.draws_at(index, seed, number)
    moments = {"mu": oracle_mu(leaf, m, draws.mu), "nu": oracle_nu(leaf, v, draws.nu)}
    updated = replace(leaf, **oracle_weight(leaf, p), **moments)
    if leaf.cast is None:
        return updated
    weight = wide(updated.master if updated.param is None else updated.param)
    values = reference.quantize(weight, leaf.cast.rowwise.dtype.type, leaf.scale)[0]
    transposed = None if leaf.cast.columnwise is None else values.reshape(leaf.gradient.shape).T
    return replace(updated, cast=Fp8Pair.with_shared_scale(values, transposed, leaf.scale, reference.amax(weight)))


def oracle_pair(leaves: list[Leaf], cast: SharedCast) -> Fp8Pair:
    """The shared cast of updated leaves."""
    rows = cast.pair.rowwise.shape[0]
    weight = np.concatenate([wide(leaves[number].param).reshape(rows, -1) for number in cast.leaves], axis=1)
    if cast.rule is not None:
        arrays = (square_cast(matrix, cast.rule.formula) for matrix in (weight, weight.T))
        return Fp8Pair(*arrays, reference.amax(weight))
    values = reference.quantize(weight, cast.pair.rowwise.dtype.type, cast.scale)[0]
    return Fp8Pair.with_shared_scale(values, values.T, cast.scale, reference.amax(weight))


def square_cast(matrix, formula: ScaleFormula) -> Fp8Array:
    def scale_of(amax, dtype):
        return reference.current_scale(amax, dtype, formula.amax_epsilon, formula.power_2_scale, formula.margin)

    return Fp8Array(*reference.quantize_by_tile(matrix, FP8[0], SQUARE, scale_of), SQUARE)


def wide(array) -> np.ndarray:
    """An array, FP8 times its scale, as flat float32."""
    if isinstance(array, Fp8Array):
        return wide(array.values) * array.scale
    return np.asarray(array).reshape(-1).astype(np.float32)


def oracle_master(leaf) -> np.ndarray:
    if leaf.master is None:
        return wide(leaf.param)
    if leaf.master.dtype != U16:
        master = wide(leaf.master)
        if leaf.param is None:
            return master
        ours, theirs = wide(master.astype(leaf.param.dtype)), wide(leaf.param)
        return np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), master, theirs)
    high, low = (leaf_bits.reshape(-1).view(np.uint16).astype(np.uint32) for leaf_bits in (leaf.param, leaf.master))
    joined = ((high - (low > 0x8000)) % 2**16 * 2**16 + low).astype(np.uint32).view(np.float32)
    param = wide(leaf.param)
    with np.errstate(all="ignore"):
        return np.where(wide(joined.astype(BF16)) == param, joined, param)


def oracle_weight(leaf, p) -> dict:
    """Param and master. Masters beside a bfloat16 param step off the ties that round away from zero."""
    if leaf.param is not None and leaf.param.dtype == BF16 and leaf.master.dtype != F16:
        p = reference.off_the_tie(p)
    if leaf.master is None:
        return {"param": p}
    if leaf.master.dtype == U16:
        return {"param": p.astype(BF16), "master": np.where(np.isnan(p), np.uint16(0), reference.remainder(p))}
    master = p.astype(leaf.master.dtype)
    return {"param": None if leaf.param is None else master.astype(leaf.param.dtype), "master": master}


def oracle_mu(leaf, m, draw):
    if isinstance(leaf.mu, Fp8Array):
        return Fp8Array(reference.quantize_at_random(m, leaf.mu.dtype, leaf.mu_scale, draw), leaf.mu_scale)
    return m if leaf.mu.dtype == F32 else reference.round_at_random(m, draw)


def oracle_nu(leaf, v, draw):
    if isinstance(leaf.nu, Fp8Array):
        return Fp8Array(reference.quantize_root(v, leaf.nu.dtype, leaf.nu_scale, draw), leaf.nu_scale)
    return v if leaf.nu.dtype == F32 else reference.round_at_random(v, draw, never_zero=True)


def whole_index(shape, place) -> np.ndarray:
    """Of every element of a shard, in NumPy's integers of 64 bits."""
    index = np.zeros(shape, np.uint64)
    for dim, (first, size) in enumerate(zip(place.first, place.whole, strict=True)):
        coordinate = np.arange(shape[dim], dtype=np.uint64) + np.uint64(first)
        index = index * np.uint64(size) + np.expand_dims(coordinate, [*range(1, len(shape) - dim)])
    return index


# ---- leaves ----------------------------------------------------------------------------------------------------------


class Draw:
    """Random arrays, cut from one block of normal numbers whose length is prime."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.block = np.resize(self.random.standard_normal(1_048_573, dtype=np.float32), 2 * 1_048_573)

    def normal(self, shape, dtype) -> np.ndarray:
        size = int(np.prod(shape))
        start = int(self.random.integers(1_048_573))
        cut = self.block[start : start + size] if size <= 1_048_573 else np.resize(self.block[:1_048_573], size)
        return cut.astype(dtype).reshape(shape)

    def leaf(self, shape, mode: Mode) -> Leaf:
        """The arrays of a leaf that persist from step to step."""
        param, master, values = mode.weight
        mu, nu = (self.normal(shape, dtype) for dtype in mode.moments)
        if master == U16:
            kept = self.random.integers(0, 2**16, shape, dtype=np.uint16)
        else:
            kept = None if master is None else self.normal(shape, master)
        weight = None if param is None else self.normal(shape, param)
        if param is not None and kept is not None and master != U16:
            edited = np.arange(weight.size).reshape(shape) % EDITED == EDITED - 1
            weight = np.where(edited, weight, rounded(kept, param))
        cast = None
        if values is not None:
            transposable = len(shape) == 2 and not any(size % 16 for size in shape)
            values_t = np.zeros(shape[::-1], values) if transposable else None
            cast = Fp8Pair.with_shared_scale(np.zeros(shape, values), values_t, self.scale(), self.scale())
        return Leaf(
            gradient=None,
            mu=self.scaled(mu),
            nu=self.scaled(np.abs(nu)),
            param=weight,
            master=kept,
            cast=cast,
            decays=mode.decays,
        )

    def side_by_side(self, shapes, modes, formula=None) -> tuple[list[Leaf], list[SharedCast]]:
        """Leaves of several shared casts, those of one cast from right to left and with a leaf of nobody after each;
        modes in turn. With a formula, each square has a scale by it."""
        leaves, shared, modes = [], [], itertools.cycle(modes)
        for number, (rows, widths) in enumerate(shapes):
            start = len(leaves)
            for width in reversed(widths):
                leaves += [self.leaf((rows, width), next(modes)), self.leaf((width,), SIX_MODES[0])]
            shape, dtype = (rows, sum(widths)), FP8[number % 2]
            members = tuple(range(start, len(leaves), 2))[::-1]
            if formula is not None:
                arrays = (self.by_squares(of) for of in (shape, shape[::-1]))
                rule = Cast.by_tile(E4M3, SQUARE, formula).rule
                shared.append(SharedCast(Fp8Pair(*arrays, np.float32(99)), None, members, rule))
                continue
            pair = Fp8Pair.with_shared_scale(
                np.zeros(shape, dtype), np.zeros(shape[::-1], dtype), self.scale(), np.float32(99)
            )
            shared.append(SharedCast(pair, self.scale(), members))
        return leaves, shared

    def by_squares(self, shape) -> Fp8Array:
        return Fp8Array(np.zeros(shape, E4M3), self.normal(tiles_of(shape, SQUARE), np.float32), SQUARE)

    def scale(self) -> np.float32:
        """A scale at which some FP8 moments saturate, and most do not."""
        return np.float32(self.random.uniform(4e-3, 8e-3))

    def scaled(self, moment):
        return Fp8Array(moment, self.scale()) if moment.dtype in FP8 else moment

    def inputs(self, leaf: Leaf, gradient_dtype) -> dict:
        """The inputs that are new in every step: the gradient, and the scales to write with."""
        scales = {name: self.scale() for name in ("scale", "mu_scale", "nu_scale")}
        return {"gradient": self.normal(leaf.mu.shape, gradient_dtype), **scales}


def rounded(master: np.ndarray, dtype) -> np.ndarray:
    """The params that belong to masters."""
    with np.errstate(all="ignore"):
        return master.astype(np.float32).astype(dtype)


def assembled(leaf: Leaf, inputs: dict) -> Leaf:
    """A leaf as the operation's argument."""
    return replace(leaf, **inputs)


def bare(leaf: Leaf) -> Leaf:
    """The persistent arrays of a leaf: those that are donated, and no others."""
    return replace(leaf, gradient=None, scale=None, mu_scale=None, nu_scale=None)


def numbers_of_step(step: int, **changes) -> Coefficients:
    b1, b2 = np.float32(0.9), np.float32(0.999)
    numbers = {
        "b1": b1,
        "one_minus_b1": 1 - b1,
        "b2": b2,
        "one_minus_b2": 1 - b2,
        "rate": 1e-3 * (step + 1),
        "eps": 1e-8,
    }
    numbers |= {"weight_decay": 0.1, "grad_scale": 0.37, "apply": 1}
    numbers |= {"correction1": 1 / (1 - b1 ** (step + 1)), "correction2": 1 / (1 - b2 ** (step + 1))}
    return Coefficients(**{name: np.float32(number) for name, number in (numbers | changes).items()})


# ---- running and comparing -------------------------------------------------------------------------------------------


def update(leaves, inputs, coefficients, seed, adam_w_mode):
    return list(map(bare, adam(list(map(assembled, leaves, inputs)), coefficients, seed, adam_w_mode)[0]))


def update_shared(leaves, pairs, shared, inputs, *args):
    """The updated leaves, then the pairs of the shared casts, which are overwritten."""
    shared = [replace(cast, pair=pair) for cast, pair in zip(shared, pairs, strict=True)]
    updated, pairs = adam(list(map(assembled, leaves, inputs)), *args, shared)
    return [*map(bare, updated), *pairs]


in_place = jax.jit(update, static_argnums=4, donate_argnums=0)
apart = jax.jit(update, static_argnums=4)
shared_in_place = jax.jit(update_shared, static_argnums=6, donate_argnums=(0, 1))


def on_the_cpu(leaves, *args):
    """The same step by the `jnp` reference."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(apart(leaves, *args))


def by_oracle(leaves, inputs, coefficients, seed, adam_w_mode):
    with np.errstate(all="ignore"):
        return [
            bare(oracle(assembled(leaf, row), coefficients, int(seed), number, adam_w_mode))
            for number, (leaf, row) in enumerate(zip(leaves, inputs, strict=True))
        ]


def shared_by_oracle(leaves, shared, inputs, coefficients, *args):
    updated = by_oracle(leaves, inputs, coefficients, *args)
    return [*updated, *(oracle_pair(updated, cast) if coefficients.apply else cast.pair for cast in shared)]


@jax.jit
def cast_apart(leaves, casts) -> list[Fp8Pair]:
    """The pairs by tile that a cast of updated leaves makes."""
    weights = ([leaves[number].param.astype(F32) for number in cast.leaves] for cast in casts)
    whole = [jnp.concatenate(side_by_side, axis=1) for side_by_side in weights]
    return [quantize_transpose(x, Cast(jnp.float32(1), cast.rule)) for x, cast in zip(whole, casts, strict=True)]


def poison(pattern: int):
    """Fill memory that results may reuse."""
    arrays = [jnp.full((size,), pattern, jnp.uint8) for size in (256, 1024, 4096, 65536, 1 << 20)]
    jax.block_until_ready(arrays)


def comparable(array) -> np.ndarray:
    """The bytes of an array, in which all NaNs have the same payload."""
    array = np.asarray(array)
    if array.dtype.itemsize == 1 or array.dtype == np.uint16:
        return as_bytes(array)
    return as_bytes(np.where(np.isnan(array), np.array(np.nan, array.dtype), array))


def compare(report: Report, group: str, got, wanted, label: str):
    """Two results of a step, array by array."""
    for number, (leaf, expected) in enumerate(zip(jax.device_get(got), wanted, strict=True)):
        arrays = jax.tree_util.tree_leaves_with_path(leaf)
        for (path, array), wanted_array in zip(arrays, jax.tree.leaves(expected), strict=True):
            what = f"{label}: {jax.tree_util.keystr(path)} {array.dtype}{list(array.shape)} of leaf {number}"
            report.bits(group, comparable(array), comparable(wanted_array), what)


def check_steps(report: Report, group: str, draw: Draw, leaves, gradient_dtypes, adam_w_mode, steps, wanted=by_oracle):
    """Several steps in a row, the third one skipped."""
    kept, expected = leaves, leaves
    for step in range(steps):
        inputs = list(map(draw.inputs, leaves, gradient_dtypes))
        args = inputs, numbers_of_step(step, apply=step != 2), np.uint32(step * 0x9E3779B9 % 2**32), adam_w_mode
        poison(0xA5 if step % 2 else 0x5A)
        kept, expected = in_place(kept, *args), wanted(expected, *args)
        compare(report, group, kept, expected, f"step {step}, {'AdamW' if adam_w_mode else 'L2'}")


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_modes(report: Report):
    """Every pair of moments with every kind of weight, gradients in turn, a fifth of them with L2. A CPU takes few."""
    draw = Draw(0)
    gradients, shapes = itertools.cycle((F32, BF16, F16)), itertools.cycle(SMALL_SHAPES)
    modes = [
        Mode(next(gradients), moments, weight, decays=number % 7 != 0)
        for number, (moments, weight) in enumerate(itertools.product(MOMENTS, WEIGHTS))
    ]
    for adam_w_mode in (True, False):
        some = modes[:: (1 if adam_w_mode else 5) * (1 if on_gpu() else 13)]
        leaves = [draw.leaf(next(shapes), mode) for mode in some]
        check_steps(report, "modes", draw, leaves, [mode.gradient for mode in some], adam_w_mode, steps=5)


def check_shapes(report: Report):
    """Every shape in six modes, against NumPy and, some of them, against the reference."""
    draw = Draw(1)
    for number, mode in enumerate(SIX_MODES if on_gpu() else SIX_MODES[4:]):
        leaves = [draw.leaf(shape, mode) for shape in (SHAPES if on_gpu() else SHAPES[:5])]
        settings = [mode.gradient] * len(leaves), number % 2 == 0
        check_steps(report, "shapes, against NumPy", draw, leaves, *settings, steps=4)
        check_steps(report, "shapes, against the reference", draw, leaves[:6], *settings, steps=1, wanted=on_the_cpu)


def check_largest_shape(report: Report):
    """The embedding of a vocabulary, against the reference; NumPy would take a minute."""
    draw = Draw(2)
    shape = LARGEST_SHAPE if on_gpu() else (160, 64)
    for mode in (SIX_MODES[1], SIX_MODES[4]):
        leaf = draw.leaf(shape, mode)
        check_steps(report, "largest shape", draw, [leaf], [mode.gradient], True, steps=1, wanted=on_the_cpu)


def check_many_leaves(report: Report):
    """More leaves than one launch holds: the leaf numbers of the second launch continue those of the first."""
    draw = Draw(3)
    modes = [SIX_MODES[number % 5] for number in range(1000 if on_gpu() else 10)]
    leaves = [draw.leaf(SMALL_SHAPES[number % 8], mode) for number, mode in enumerate(modes)]
    gradients = [mode.gradient for mode in modes]
    check_steps(report, "many leaves", draw, leaves, gradients, True, steps=2)


def check_launches(report: Report):
    """A tree in several custom calls: leaf numbers continue, and shared casts are not split."""
    draw = Draw(11)
    leaves, shared = draw.side_by_side(SHARED_SHAPES, SHARED_MODES)
    pairs, apart = [cast.pair for cast in shared], [replace(cast, pair=None) for cast in shared]
    modes = SIX_MODES[:5] * 2
    flat = [draw.leaf(shape, mode) for shape, mode in zip(SMALL_SHAPES * 2, modes, strict=False)]
    with mock.patch("jax_fp8.kernels.adam.LAUNCH_ELEMENTS", 100):
        inputs = [draw.inputs(leaf, F32 if leaf.param.dtype == F32 else BF16) for leaf in leaves]
        spans = list(launches([row["gradient"].size for row in inputs], [cast.leaves for cast in shared]))
        report.expect("several launches", len(spans) > 1, f"there is one launch, {spans}")
        args = inputs, numbers_of_step(1), np.uint32(7), True
        wanted = shared_by_oracle(leaves, shared, *args)
        got = jax.device_get(jax.jit(update_shared, static_argnums=6)(leaves, pairs, apart, *args))
        compare(report, "several launches", got, wanted, "shared casts")
        inputs = [draw.inputs(leaf, mode.gradient) for leaf, mode in zip(flat, modes, strict=False)]
        args = inputs, numbers_of_step(1), np.uint32(7), True
        got = jax.device_get(jax.jit(update, static_argnums=4)(flat, *args))
        compare(report, "several launches", got, by_oracle(flat, *args), "all kinds of storage")


def check_shared_casts(report: Report):
    """Leaves side by side in one cast, several steps in a row, the third one skipped.
    A wrong order of leaves is noticed."""
    draw = Draw(10)
    for adam_w_mode in (True, False):
        leaves, shared = draw.side_by_side(SHARED_SHAPES + (LARGE_SHARED_SHAPES if on_gpu() else ()), SHARED_MODES)
        kept, pairs = leaves, [cast.pair for cast in shared]
        for step in range(4):
            shared = [replace(cast, pair=pair, scale=draw.scale()) for cast, pair in zip(shared, pairs, strict=True)]
            inputs = [draw.inputs(leaf, F32 if leaf.param.dtype == F32 else BF16) for leaf in leaves]
            args = inputs, numbers_of_step(step, apply=step != 2), np.uint32(step + 5), adam_w_mode
            wanted = shared_by_oracle(kept, shared, *args)
            poison(0xA5 if step % 2 else 0x5A)
            got = jax.device_get(shared_in_place(kept, pairs, [replace(cast, pair=None) for cast in shared], *args))
            compare(report, "shared casts", got, wanted, f"step {step}, {'AdamW' if adam_w_mode else 'L2'}")
            kept, pairs = got[: len(leaves)], got[len(leaves) :]
        swapped = oracle_pair(kept, replace(shared[2], leaves=shared[2].leaves[::-1]))
        noticed = not np.array_equal(as_bytes(swapped.rowwise.values), as_bytes(pairs[2].rowwise.values))
        report.expect("controls: a wrong number is noticed", noticed, "the order of leaves does not change their cast")


def check_casts_by_tile(report: Report):
    """A scale for each square, from the new weights: what a cast of its own behind the step makes. Several steps in a
    row, the third one skipped. The scales of the weights before are noticed."""
    draw = Draw(12)
    for formula, adam_w_mode in zip(FORMULAS if on_gpu() else FORMULAS[1:2], (True, False, True), strict=False):
        shapes = TILED_SHAPES + (LARGE_TILED_SHAPES if on_gpu() else ())
        leaves, shared = draw.side_by_side(shapes, SHARED_MODES, formula)
        bare_casts, kept, pairs = [replace(cast, pair=None) for cast in shared], leaves, [cast.pair for cast in shared]
        for step in range(4):
            before = [replace(cast, pair=pair) for cast, pair in zip(shared, pairs, strict=True)]
            inputs = [draw.inputs(leaf, F32 if leaf.param.dtype == F32 else BF16) for leaf in leaves]
            args = inputs, numbers_of_step(step, apply=step != 2), np.uint32(step + 5), adam_w_mode
            wanted = shared_by_oracle(kept, before, *args)
            poison(0xA5 if step % 2 else 0x5A)
            got = jax.device_get(shared_in_place(kept, pairs, bare_casts, *args))
            compare(report, "casts by tile", got, wanted, f"step {step}, {formula}")
            apart = jax.device_get(cast_apart(got, bare_casts))
            compare(report, "casts by tile, apart", got[len(leaves) :] if step != 2 else apart, apart, f"step {step}")
            last, kept, pairs = pairs, got[: len(leaves)], got[len(leaves) :]
        noticed = not np.array_equal(np.asarray(last[0].rowwise.values), np.asarray(pairs[0].rowwise.values))
        report.expect("controls: a wrong number is noticed", noticed, "a step changes no weight in FP8")


def check_special_values(report: Report):
    """Every special gradient with every special master and moment, at rates that move a master or keep it on a tie."""
    draw = Draw(4)
    special = np.array(ORDINARY + TIES + (TINY if on_gpu() else ()), np.float32)
    gradient, master, moment = (grid.reshape(-1) for grid in np.meshgrid(special, special, special[::3]))

    def leaf(moments, weight):
        leaf = draw.leaf(gradient.shape, Mode(F32, moments, weight))
        mu, nu = moment.astype(moments[0]), np.abs(moment).astype(moments[1])
        changes = {"mu": draw.scaled(mu), "nu": draw.scaled(nu)}
        if weight[1] == U16:
            high, low = np.divmod(master.view(np.uint32), 2**16)
            return replace(leaf, **changes, param=high.astype(np.uint16).view(BF16), master=low.astype(np.uint16))
        if not weight[1]:
            return replace(leaf, **changes, param=master.astype(weight[0]))
        changes["master"] = master.astype(weight[1])
        if weight[0]:
            edited = np.arange(master.size) % EDITED == EDITED - 1
            changes["param"] = np.where(edited, gradient.astype(weight[0]), rounded(changes["master"], weight[0]))
        return replace(leaf, **changes)

    for dtype in (F32, BF16, E4M3, E5M2):
        with np.errstate(all="ignore"):
            leaves = [leaf((dtype, dtype), weight) for weight in (WEIGHTS if on_gpu() else WEIGHTS[1:9:3])]
        inputs = [draw.inputs(leaf, F32) | {"gradient": gradient} for leaf in leaves]
        for rate, grad_scale in ((0, 1), (1e-3, 0.37)):
            args = leaves, inputs, numbers_of_step(0, rate=rate, grad_scale=grad_scale), np.uint32(7), True
            compare(report, "special values", apart(*args), by_oracle(*args), f"{np.dtype(dtype).name} {rate=}")


def check_all_16_bit_patterns(report: Report):
    """Every 16-bit gradient, moment, param and remainder, each beside a random other one; and every FP8 moment."""
    draw, random = Draw(5), np.random.default_rng(5)

    def patterns(dtype):
        bits = random.permutation(2**16).astype(np.uint16)
        values = bits.astype(np.uint8).view(dtype) if np.dtype(dtype).itemsize == 1 else bits.view(dtype)
        if on_gpu() or dtype == U16:
            return values
        return np.where(np.abs(values.astype(np.float32)) < 1e-6, np.ones((), dtype), values)

    for dtype in (BF16, F16):
        for moment in (BF16, E4M3, E5M2):
            leaf = draw.leaf((2**16,), Mode(dtype, (moment, moment), (BF16, U16, E4M3)))
            changes = {"mu": draw.scaled(patterns(moment)), "nu": draw.scaled(patterns(moment))}
            leaf = replace(leaf, **changes, param=patterns(BF16), master=patterns(U16))
            inputs = [draw.inputs(leaf, dtype) | {"gradient": patterns(dtype)}]
            for rate in (0, 1e-3):
                args = inputs, numbers_of_step(3, rate=rate), np.uint32(9), False
                label = f"{np.dtype(dtype).name} with {np.dtype(moment).name} {rate=}"
                compare(report, "all 16-bit patterns", apart([leaf], *args), by_oracle([leaf], *args), label)


def check_what_is_written(report: Report):
    """A skipped step changes no byte. Donated arrays are updated in place, and others stay unchanged."""
    draw = Draw(6)
    modes = SIX_MODES[:: 1 if on_gpu() else 3]
    leaves = [draw.leaf((48, 32), mode) for mode in modes]
    inputs = [draw.inputs(leaf, mode.gradient) for leaf, mode in zip(leaves, modes, strict=True)]
    inputs[0]["gradient"][3] = np.nan
    before = jax.tree.map(as_bytes, leaves)
    for apply in (0, 1):
        given = jax.tree.map(jnp.array, leaves)
        poison(0xA5)
        args = inputs, numbers_of_step(1, apply=apply), np.uint32(1), True
        kept = apart(given, *args)
        unchanged = [
            np.array_equal(*pair)
            for pair in zip(*map(jax.tree.leaves, (jax.tree.map(as_bytes, given), before)), strict=True)
        ]
        report.expect("not donated, not written", all(unchanged), f"{apply=}: {unchanged}")
        addresses = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(given)]
        updated = in_place(given, *args)
        compare(report, "donated or not", updated, jax.device_get(kept), f"{apply=}")
        if on_gpu():
            moved = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(updated)] != addresses
            report.expect("in place", not moved, f"{apply=}: a donated array was copied")
        same = [np.array_equal(as_bytes(a), b) for a, b in zip(*map(jax.tree.leaves, (updated, before)), strict=True)]
        report.expect("a skipped step writes nothing", all(same) if apply == 0 else not any(same), f"{apply=}: {same}")


def check_shards(report: Report):
    """Shards of leaves: each element is rounded by its index in the whole leaf."""
    draw = Draw(13)
    modes = [SIX_MODES[2 + number % 4] for number in range(2 * len(SHARDS))]
    places = [(shape, Place(tuple(map(np.uint32, first)), whole)) for shape, whole, first in SHARDS.values()] * 2
    leaves = [draw.leaf(shape, mode) for (shape, _), mode in zip(places, modes, strict=True)]
    inputs = [draw.inputs(leaf, mode.gradient) for leaf, mode in zip(leaves, modes, strict=True)]
    args = inputs, numbers_of_step(1), np.uint32(11), True
    remaining = iter(place for _ in range(10) for _, place in places)
    with mock.patch("jax_fp8.kernels.adam.Place.on_shard", side_effect=lambda *_: next(remaining)):
        got = apart(leaves, *args)
    with np.errstate(all="ignore"):
        wanted = [
            bare(oracle(assembled(leaf, row), args[1], 11, number, True, whole_index(*place)))
            for number, (leaf, row, place) in enumerate(zip(leaves, inputs, places, strict=True))
        ]
    compare(report, "shards", got, wanted, "by the index in the whole leaf")
    bits = (
        [as_bytes(leaf.nu.values if isinstance(leaf.nu, Fp8Array) else leaf.nu) for leaf in some]
        for some in (wanted, by_oracle(leaves, *args))
    )
    noticed = sum(not np.array_equal(*pair) for pair in zip(*bits, strict=True))
    report.expect("controls: a wrong number is noticed", noticed > len(leaves) // 2, "an index counted from zero")


def check_controls(report: Report):
    """Negative controls: each number of a step, changed by the least amount, must change the result."""
    draw = Draw(7)
    leaves = [draw.leaf((144, 80), Mode(F32, (F32, nu), (F32, None, E4M3))) for nu in (F32, E4M3)]
    inputs, numbers = [draw.inputs(leaf, F32) for leaf in leaves], numbers_of_step(1)
    got = jax.device_get(apart(leaves, inputs, numbers, np.uint32(3), True))
    compare(report, "controls", got, by_oracle(leaves, inputs, numbers, 3, True), "as it should be")

    def control(name, position, array, leaves=leaves, inputs=inputs, numbers=numbers, seed=3, adam_w_mode=True):
        wrong = by_oracle(leaves, inputs, numbers, seed, adam_w_mode)[position]
        pairs = zip(
            *(map(as_bytes, jax.tree.leaves(getattr(leaf, array))) for leaf in (got[position], wrong)), strict=True
        )
        noticed = not all(np.array_equal(*pair) for pair in pairs)
        report.expect("controls: a wrong number is noticed", noticed, f"{name} does not change {array}")

    for name in ("rate", "b1", "one_minus_b1", "b2", "one_minus_b2", "weight_decay", "correction1", "correction2"):
        off = replace(numbers, **{name: np.nextafter(getattr(numbers, name), np.float32(9))})
        control(name, 0, {"1": "mu", "2": "nu"}[name[-1]] if "b" in name else "param", numbers=off)
    control("grad_scale", 0, "mu", numbers=replace(numbers, grad_scale=np.float32(0.3700001)))
    control("the mode", 0, "param", adam_w_mode=False)
    control("decays", 0, "param", leaves=[replace(leaf, decays=False) for leaf in leaves])
    control("the seed", 1, "nu", seed=4)
    control(
        "the scale", 0, "cast", inputs=[row | {"scale": np.nextafter(row["scale"], np.float32(9))} for row in inputs]
    )
    control("the leaf's number", -1, "nu", leaves=[leaves[0], *leaves], inputs=[inputs[0], *inputs])


def check_over_2_to_31_elements(report: Report):
    """The rows of a periodic leaf come out equal but for their moments, some rows as NumPy has them, and the transpose
    is one; 26 GB.
    """
    draw = Draw(8)
    rows, cols = OVER_2_TO_31 if on_gpu() else (32, 64)
    row = draw.leaf((cols,), SIX_MODES[2])
    inputs = draw.inputs(row, BF16)
    args = numbers_of_step(1), np.uint32(5), True

    @jax.jit
    def repeated(row, gradient):
        def repeat(x):
            return jnp.broadcast_to(x, (rows, cols)) if x.ndim else x

        leaf = jax.tree.map(repeat, row)
        return replace(
            leaf,
            cast=Fp8Pair.with_shared_scale(
                leaf.cast.rowwise.values, jnp.zeros((cols, rows), E4M3), *leaf.cast.arrays[2:]
            ),
        ), repeat(gradient)

    def arrays_of(leaf):
        return [leaf.param, leaf.master, *leaf.cast.arrays[:2]]

    @jax.jit
    def consistent(leaf):
        arrays = arrays_of(leaf)
        bits = [x if x.dtype == U16 else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in arrays]
        return [jnp.all(x == x[0]) for x in bits[:3]] + [jnp.all(bits[3] == bits[2].T)]

    leaf, gradient = repeated(row, inputs["gradient"])
    (updated,) = in_place([leaf], [inputs | {"gradient": gradient}], *args)
    for name, same in zip(("param", "master", "values", "values_t"), consistent(updated), strict=True):
        report.expect("over 2**31 elements", bool(same), f"the periods of {name} differ")
    spoiled = replace(
        updated, param=jax.lax.dynamic_update_slice(updated.param, jnp.full((1, 1), 99, BF16), (rows - 1, cols - 1))
    )
    report.expect("over 2**31 elements", not consistent(spoiled)[0], "one wrong element is not noticed")
    for at in (0, rows // 2, rows - 1):  # the rounding of moments depends on the index
        one = jax.tree.map(lambda x, at=at: x[at] if x.ndim else x, updated)
        one = replace(one, cast=replace(one.cast, columnwise=None))
        index = np.uint64(at * cols) + np.arange(cols, dtype=np.uint64)
        wanted = bare(oracle(assembled(row, inputs), args[0], int(args[1]), 0, True, index))
        compare(report, "over 2**31 elements", [one], [wanted], f"row {at}")


def check_graphs(report: Report):
    """A CUDA graph, captured, replayed and updated, gives the same bytes as a run without one."""
    draw = Draw(9)
    modes = SIX_MODES[:: 1 if on_gpu() else 3]
    start = [draw.leaf((144, 80), mode) for mode in modes]
    plain_options = {"xla_gpu_enable_command_buffer": ""}
    programs = [
        jax.jit(partial(update, adam_w_mode=True), donate_argnums=0, compiler_options=options)
        for options in (CUDA_GRAPH_OPTIONS, plain_options)
    ]
    kept = [jax.tree.map(jnp.array, start) for _ in programs]
    for step in range(5):
        inputs = [draw.inputs(leaf, mode.gradient) for leaf, mode in zip(start, modes, strict=True)]
        args = inputs, numbers_of_step(step, apply=step != 3), np.uint32(step)
        results = [program(leaves, *args) for program, leaves in zip(programs, kept, strict=True)]
        compare(report, "CUDA graph", results[0], jax.device_get(results[1]), f"step {step}")
        kept = results


def check_refusals(report: Report):
    """Every call that breaks the contract raises, and the message names operation and argument."""
    if not on_gpu():
        return  # the reference takes anything
    x, one = jnp.ones((32, 64)), [11, (1, 5)]
    one_scale = jnp.float32(1)
    scalars = one_scale, one_scale  # of values: their scale and amax
    brain, weight, integer = x.astype(BF16), x.astype(E4M3), x.astype(jnp.int32)

    def raw(layout, *arrays, shared=one, seed=None, places=None, aliased=True, place=(-1, 0), casts=(), by_tile=False):
        words = jnp.zeros((len(layout), PLACE_WORDS) if places is None else places, jnp.uint32)
        operands = [*map(jnp.ones, shared), jnp.uint32(0) if seed is None else seed, words, *casts, *arrays]
        shared_casts = len(casts) // (5 if by_tile else 4)
        updated = [*range(4, 4 + len(casts)), *range(5 + len(casts), len(operands))]
        results = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in updated]
        aliases = {operand: result for result, operand in enumerate(updated)} if aliased else None
        call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
        attributes = {"layout": layout, "shared_cast": [place[0]], "first_column": [place[1]]}
        attributes = {name: np.array(numbers, np.int32) for name, numbers in attributes.items()}
        attributes |= {"first_leaf": np.int32(0), "by_tile": by_tile, "margin": np.int32(0)}
        attributes |= {"amax_epsilon": np.float32(0), "power_2_scale": True}
        return lambda: call(*operands, **attributes, shared_casts=np.int32(shared_casts), adam_w_mode=True)

    cases = [
        (raw([1], x, x, x), "the arrays of its layout"),
        (raw([1], x, x, x, x, shared=[10, (1, 5)]), "scalars must have shape [11]"),
        (raw([1], x, x, x, x, shared=[11, (2, 5)]), "scales must have shape [1, 5]"),
        (raw([1], x, x, x, x, seed=jnp.int32(0)), "seed must be uint32"),
        (raw([1], x, x, x, x, places=(1, 9)), "places must have shape [1, 10]"),
        (raw([5], x, x, x, x, weight, brain[0, 0], one_scale), "scale of leaf 0 must be a float32 scalar"),
        (raw([5], x, x, x, x, weight, one_scale, x), "amax of leaf 0 must be a float32 scalar"),
        (raw([1], x, weight, x, x), "mu of leaf 0 must come with a scale"),
        (raw([33], x, x, x, x, one_scale), "nu of leaf 0 must come with a scale if it is FP8, and only then"),
        (raw([1], integer, x, x, x), "g of leaf 0 must be float32, bfloat16 or float16"),
        (raw([1], x, integer, x, x), "mu of leaf 0 must be"),
        (raw([1], x, x, x.astype(F16), x), "nu of leaf 0 must be float32, bfloat16, float8_e4m3fn or float8_e5m2"),
        (raw([1], x, x, integer, x), "nu of leaf 0 must be"),
        (raw([1], x, x[:16], x, x), "mu of leaf 0 must have the shape of g"),
        (raw([1], x, x, x, x, aliased=False), "must be updated in place"),
        (raw([0], x, x, x), "g of leaf 0 must come with a param, a master or both"),
        (raw([1], x, x, x, brain), "param of leaf 0 must be float32 when it has no master"),
        (raw([3], x, x, x, x, x), "when it has a master"),
        (raw([3], x, x, x, brain, brain), "master of leaf 0 must be float32, float16 or"),
        (raw([3], x, x, x, x.astype(F16), x.astype(U16)), "bfloat16 param"),
        (raw([2], x, x, x, x), "master of leaf 0 must come with FP8 values"),
        (raw([5], x, x, x, x, x, *scalars), "values of leaf 0 must be float8_e4m3fn or float8_e5m2"),
        (raw([9], x, x, x, x, weight.T), "values_t of leaf 0 must come with values"),
        (
            raw([13], x, x, x, x, weight, weight, *scalars),
            "values_t of leaf 0 must have rank 2 and the transposed shape",
        ),
        (
            raw([13], x, x, x, x, weight, weight.T.astype(E5M2), *scalars),
            "values_t of leaf 0 must have the dtype of values",
        ),
        (raw([13], *[x[:, :40]] * 4, weight[:, :40], weight[:, :40].T, *scalars), "divisible by 16"),
    ]
    pair = weight, weight.T, *scalars
    half, odd, short = [x[:, :32]] * 4, [x[:, :40]] * 4, [x[:16, :32]] * 4
    cases += [
        (
            raw([1], *half, place=(0, 0)),
            "shared_cast must be -1 or the number of one of the call's 0 shared casts, got 0",
        ),
        (raw([1], *half, place=(1, 0), casts=pair), "number of one of the call's 1 shared casts, got 1"),
        (raw([1], *half, place=(0, 48), casts=pair), "g of leaf 0 must lie within its shared cast"),
        (raw([1], *half, place=(0, 8), casts=pair), "g of leaf 0 must lie within its shared cast"),
        (raw([1], *half, place=(0, -16), casts=pair), "g of leaf 0 must lie within its shared cast"),
        (raw([1], *odd, place=(0, 0), casts=pair), "g of leaf 0 must be a matrix with the rows of its shared cast"),
        (raw([1], *short, place=(0, 0), casts=pair), "g of leaf 0 must be a matrix with the rows of its shared cast"),
        (
            raw([5], *half, weight[:, :32], *scalars, place=(0, 0), casts=pair),
            "values of leaf 0 must be absent where the leaf has a place in a shared cast",
        ),
        (raw([1], *half, casts=(weight, weight, *scalars)), "values_t of shared cast 0 must have rank 2"),
        (raw([1], *half, casts=(x, x.T, *scalars)), "values of shared cast 0 must be float8_e4m3fn or float8_e5m2"),
    ]
    one_square, two = jnp.ones((1, 1)), jnp.ones((2, 1))
    tiled = weight, weight.T, one_square, one_scale, one_square
    cases += [
        (raw([1], *half, casts=pair, by_tile=True), "the arrays of its layout"),
        (
            raw([1], *half, casts=(*tiled[:2], two, *tiled[3:]), by_tile=True),
            "scale of shared cast 0 must be float32, one for each square of values",
        ),
        (
            raw([1], *half, casts=(*tiled[:4], two), by_tile=True),
            "scale_t of shared cast 0 must be float32, one for each square of values_t",
        ),
        (
            raw([1], *half, casts=(*(x.astype(E5M2) for x in tiled[:2]), *tiled[2:]), by_tile=True),
            "values of shared cast 0 must be float8_e4m3fn by tile",
        ),
        (
            raw([1], *half, place=(0, 0), casts=tiled, by_tile=True),
            "g of leaf 0 must begin at a column divisible by 128 of its shared cast by tile",
        ),
        (
            raw([1], *half, place=(0, 32), casts=tiled, by_tile=True),
            "g of leaf 0 must begin at a column divisible by 128 of its shared cast by tile",
        ),
    ]
    for call, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(call)())
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            said = fragment in str(error) and TARGET in str(error)
            report.expect("refusals", said, f"{fragment!r} is not in: {error}")


# ---- the report ------------------------------------------------------------------------------------------------------


CHECKS = [check_controls, check_what_is_written, check_shapes, check_modes, check_many_leaves, check_special_values]
CHECKS += [check_shared_casts, check_casts_by_tile, check_launches, check_shards]
CHECKS += [check_all_16_bit_patterns, check_largest_shape, check_over_2_to_31_elements, check_graphs, check_refusals]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, target=TARGET, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
