"""Calls of csrc/few_rows_gemm.cu on the CPU, and what each must make of its operands, in float64."""

import ml_dtypes
import numpy as np
import pytest
from emulation import ORDERS, EmulationError, InPlace, Late, Result, compile_for_cpu
from reference import quantize

SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
F32, BF16, F16 = SOURCES
E4M3 = ml_dtypes.float8_e4m3fn
ONE, LINES, SQUARES = range(3)  # in the order of Scaling
# The scales, and whether a is bfloat16.
PAIRS = {"": (ONE, False), "1d2d": (LINES, False), "bfloat16": (ONE, True), "bfloat16, 2d": (SQUARES, True)}

ENTRY = """
extern "C" int multiply(int64_t m, int64_t n, int64_t k, int64_t a_is_bfloat16, int64_t scaling, int64_t d_type,
                        double alpha, int64_t config, int64_t normalizes, int64_t casts, double epsilon,
                        int64_t activation, int64_t gated, int64_t in_place, int64_t follows,
                        const void* a, const void* b, const float* a_scale, const float* b_scale,
                        const void* bias, const void* c, void* d, const float* norm_scale, const float* norm_bias,
                        void* rows, const float* d_scale) {
  using namespace jax_fp8;
  using namespace jax_fp8::few_rows_gemm;
  const Problem problem = {static_cast<int>(m),
                           static_cast<int>(n),
                           static_cast<int>(k),
                           a_is_bfloat16 != 0,
                           static_cast<Scaling>(scaling),
                           static_cast<SourceType>(d_type),
                           static_cast<float>(alpha),
                           static_cast<int32_t>(config),
                           {normalizes != 0, casts != 0, static_cast<float>(epsilon)},
                           d_scale != nullptr,
                           activation >= 0,
                           gated != 0,
                           static_cast<Activation>(activation < 0 ? 0 : activation)};
  const Following following(follows != 0);
  const Operands operands = {a, b, a_scale, b_scale, bias, in_place ? d : c, d, norm_scale, norm_bias, rows, d_scale};
  return enqueue(problem, operands, nullptr).empty() ? 0 : 1;
}
"""


NO_WARPGROUPS = ("few_rows_gemm.cu", "compiled.sharedSizeBytes > 0", "false")
NO_CLUSTERS = ("kernel_launch.h", "compiled.ptxVersion >= 90", "false")
# By compute capability, what the emulated device does not have.
DEVICES = {"9.0": (), "10.0": (NO_WARPGROUPS,), "8.9": (NO_WARPGROUPS, NO_CLUSTERS)}


def tiles(size):
    return -(-size // 128)


def filled_up(size):
    return -(-size // 4) * 4


class Product:
    """One call: its operands, made at random, and what it must make of them. Of `integers`, all sums are exact.

    `config` has the digits of csrc/few_rows_gemm_plans.h: stages, chunks of a step, steps of a phase, cluster, tiles,
    warps along n, along k. `d_scale` casts d from bfloat16.
    """

    follows = False  # a kernel that has not ended when this one begins

    def __init__(
        self, m, n, k, pair="", *, d=BF16, config=0, bias=False, c=False, alpha=1.0, integers=False, device="9.0",
        d_scale=None,
    ):  # fmt: skip
        self.shape, self.d, self.config, self.alpha = (m, n, k), d, config, alpha
        self.device, self.changes = device, DEVICES[device]
        self.d_scale = None if d_scale is None else np.float32(d_scale)
        self.scaling, self.a_is_bfloat16 = PAIRS[pair]
        random = np.random.default_rng([m, n, k])
        if integers:
            self.a, self.b = random.integers(-3, 4, (m, k)), random.integers(-3, 4, (n, k))
        else:
            self.a, self.b = random.normal(size=(m, k)), random.normal(size=(n, k))
        self.a, self.b = self.a.astype(BF16 if self.a_is_bfloat16 else E4M3), self.b.astype(E4M3)
        lines = (tiles(k), filled_up(m)) if self.scaling == LINES else ()
        squares = () if self.scaling == ONE else (tiles(n), filled_up(tiles(k)))
        if integers:
            self.a_scale, self.b_scale = (np.exp2(2.0 * random.integers(0, 2, shape) - 1) for shape in (lines, squares))
        else:
            self.a_scale, self.b_scale = (random.uniform(0.5, 2, shape) for shape in (lines, squares))
        self.a_scale, self.b_scale = (np.array(scale, np.float32) for scale in (self.a_scale, self.b_scale))
        added = (lambda shape: random.integers(-9, 9, shape)) if integers else (lambda shape: random.normal(size=shape))
        self.bias = added(n).astype(BF16 if d == F32 else d) if bias else None
        self.c = added((m, n)).astype(d) if c else None

    def run(self, changes=(), orders=tuple(ORDERS), in_place=False):
        """The result d; with `in_place` it is written over c."""
        added = [None, InPlace(self.c)] if in_place else [self.c, self.result()]
        late = [self.given(), self.a_scale, *added]  # what kernels before may write or read
        if self.follows:
            late = [array if array is None else Late(array) for array in late]
        operands = [late[0], self.b, late[1], self.b_scale, self.bias, *late[2:]]
        how = [self.a_is_bfloat16, self.scaling, SOURCES.index(self.d), self.alpha, self.config]
        settings, norm = self.around()
        kernels = compile_for_cpu("few_rows_gemm.cu", ENTRY, (*changes, *self.changes))
        m, _, k = self.shape
        has_rows = settings[1] and self.device == "9.0"  # where a kernel of its own casts them
        rows = Result((m, k), E4M3) if has_rows else None
        d, *_ = kernels.call(
            "multiply", *self.shape, *how, *settings, in_place, self.follows, *operands, *norm, rows,
            None if self.d_scale is None else self.d_scale[None], orders=orders
        )  # fmt: skip
        return d

    def given(self):
        """The operand a as the kernel gets it."""
        return self.a

    def result(self):
        return Result(self.shape[:2], self.d if self.d_scale is None else E4M3)

    def around(self):
        """What the kernel does besides: normalizes, casts, epsilon, activation, gated; and the norm's arrays."""
        return [False, False, 0.0, -1, False], [None, None]

    def expected(self):
        """The product, and the sum of its magnitudes: what errors are measured by."""
        (m, n, k), a, b = self.shape, self.a.astype(np.float64), self.b.astype(np.float64)
        a_scale, b_scale = self.a_scale.astype(np.float64), self.b_scale.astype(np.float64)
        if self.scaling == LINES:
            a_scale = np.repeat(a_scale.T[:m], 128, axis=1)[:, :k]
        if self.scaling != ONE:
            b_scale = np.repeat(np.repeat(b_scale, 128, axis=0)[:n], 128, axis=1)[:, :k]
        a, b = a * a_scale, b * b_scale
        product, magnitudes = self.alpha * (a @ b.T), abs(self.alpha) * (abs(a) @ abs(b).T)
        for added in (self.bias, self.c):
            if added is not None:
                product, magnitudes = product + added.astype(np.float64), magnitudes + abs(added.astype(np.float64))
        return product, magnitudes

    def fits(self, d):
        """By element, whether it has the error of sums in float32, in any order, and of one rounding of the result."""
        expected, magnitudes = self.expected()
        with np.errstate(invalid="ignore"):
            allowed = magnitudes * 2.0**-18 + abs(expected) * float(ml_dtypes.finfo(self.d).eps)
            return abs(d.astype(np.float64) - expected) <= allowed + 2.0**-100

    def check(self, changes=(), orders=tuple(ORDERS)):
        assert self.fits(self.run(changes, orders)).all()

    def check_exact(self, changes=(), orders=tuple(ORDERS)):
        d, expected = self.run(changes, orders), self.expected()[0].astype(self.d)
        if self.d_scale is not None:
            expected = quantize(expected, E4M3, self.d_scale)[0]
        assert (d.view(np.uint8) == expected.view(np.uint8)).all()

    def check_mistake(self, file, right, wrong, sentence=None):
        """A planted mistake must be noticed: by the harness with this sentence, or else by the numbers too."""
        errors = EmulationError if sentence else (AssertionError, EmulationError)
        with pytest.raises(errors, match=sentence):
            self.check_exact(((file, right, wrong), *self._only_own_kernels()))

    def _only_own_kernels(self):
        """Changes that leave only the kernels of these dtypes and of few rows, so that a mistake compiles sooner."""
        kept = ("BFloat16" if self.a_is_bfloat16 else "Float16", ("One", "Lines", "Squares")[self.scaling])
        pairs = (("BFloat16", "Squares"), ("BFloat16", "One"), ("Float16", "Lines"), ("Float16", "One"))
        calls = [f"by_rows<{wide}, Scaling::k{scaling}>(arguments, device, stream)" for wide, scaling in pairs]
        others = [f"launch_warpgroups<Scaling::k{scaling}>(arguments, device, stream)" for scaling in ("Lines", "One")]
        has_warpgroups = self.device == "9.0" and not self.a_is_bfloat16
        gone = [call for call, of in zip(calls, pairs, strict=True) if of != kept or has_warpgroups]
        gone += [call for call in others if not has_warpgroups or kept[1] not in call]
        changes = [("few_rows_gemm.cu", call, "cudaErrorInvalidValue") for call in gone]
        if self.shape[0] <= 8:
            line = "    case 4: return launch<Wide, kScaling, 4, 2>(arguments, device, stream);\n"
            most = "launch<Wide, kScaling, 8, 2>(arguments, device, stream)"
            changes += [("few_rows_gemm.cu", line, ""), ("few_rows_gemm.cu", most, "cudaErrorInvalidValue")]
        return tuple(changes)
