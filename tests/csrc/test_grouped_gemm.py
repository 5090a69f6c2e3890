"""csrc/grouped_gemm.cu on the CPU: copies, barriers and tensor cores as tests/emulation has them, against float64."""

import ml_dtypes
import numpy as np
import pytest
from emulation import EmulationError, Result, compile_for_cpu, planted

NONE, ROWS, DEPTH = range(3)  # in the order of Groups
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
E4M3, E5M2 = FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]  # in the order of Fp8Type
F32, BF16, F16 = SOURCES

ENTRY = """
#include <cstdio>

extern "C" int grouped_gemm(int64_t kind, int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_type,
                            int64_t b_type, int64_t by_tile, int64_t d_type, double alpha, const void* a,
                            const void* b, const float* a_scale, const float* b_scale, const void* bias, const void* c,
                            const int32_t* starts, void* d) {
  using namespace jax_fp8;
  using namespace jax_fp8::grouped_gemm;
  const ProductShape shape = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), static_cast<int>(groups)};
  const Problem problem = {static_cast<Groups>(kind),     shape,        static_cast<Fp8Type>(a_type),
                           static_cast<Fp8Type>(b_type),  by_tile != 0, static_cast<SourceType>(d_type),
                           static_cast<float>(alpha)};
  const Operands operands = {a, b, a_scale, b_scale, bias, c, starts, d};
  const std::string error = enqueue(problem, operands, nullptr);
  return error.empty() ? 0 : 1;
}
"""


def filled_up(size):
    return -(-size // 4) * 4


class Product:
    """One call: its operands, made at random, and what it must make of them."""

    def __init__(self, kind, m, n, k, *, by_tile, d, sizes=None, a=E4M3, b=E4M3, bias=False, c=False, alpha=1.0):
        self.kind, self.m, self.n, self.k, self.by_tile, self.d, self.alpha = kind, m, n, k, by_tile, d, alpha
        self.groups = 1 if sizes is None else len(sizes)
        self.starts = None if sizes is None else np.cumsum([0, *sizes]).astype(np.int32)
        random = np.random.default_rng([kind, m, n, k])
        matrices = self.groups if kind == ROWS else 1
        results = self.groups if kind == DEPTH else 1
        self.a, self.b = random.normal(size=(m, k)).astype(a), random.normal(size=(matrices, n, k)).astype(b)
        steps, squares = -(-k // 128), -(-n // 128)
        shapes = [(steps, filled_up(m)), (matrices, squares, filled_up(steps))] if by_tile else [(), ()]
        self.a_scale, self.b_scale = (random.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes)
        self.bias = random.normal(size=n).astype(BF16 if d == F32 else d) if bias else None
        self.c = random.normal(size=(results, m, n)).astype(d) if c else None
        if kind == ROWS:
            self.a.view(np.uint8)[self.starts[-1] :] = 0x7F  # NaN, which must not come through

    def run(self, changes=()):
        operands = [self.a, self.b, self.a_scale, self.b_scale, self.bias, self.c, self.starts]
        types = [FP8.index(self.a.dtype), FP8.index(self.b.dtype), self.by_tile, SOURCES.index(self.d), self.alpha]
        result = Result((self.groups if self.kind == DEPTH else 1, self.m, self.n), self.d)
        kernels = compile_for_cpu("grouped_gemm.cu", ENTRY, changes)
        shape = (self.kind, self.m, self.n, self.k, self.groups)
        (d,) = kernels.call("grouped_gemm", *shape, *types, *operands, result)
        return d

    def values(self):
        """a[m, k] and b[matrices, n, k] times their scales, float64."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        if not self.by_tile:
            return a * self.a_scale, b * self.b_scale
        a_scale = np.repeat(self.a_scale.T[: self.m], 128, axis=1)[:, : self.k]
        b_scale = np.repeat(np.repeat(self.b_scale, 128, axis=1)[:, : self.n], 128, axis=2)[..., : self.k]
        return a * a_scale, b * b_scale

    def expected(self):
        """The products, and the sum of their magnitudes: what errors are measured by."""
        a, b = self.values()
        sums = []
        for x, y in ((a, b), (abs(a), abs(b))):
            if self.kind == NONE:
                sums.append((x @ y[0].T)[None])
            elif self.kind == ROWS:
                ends = [*self.starts, self.m]
                parts = [x[ends[g] : ends[g + 1]] @ y[g].T for g in range(self.groups)]
                sums.append(np.concatenate([*parts, np.zeros((self.m - ends[-2], self.n))])[None])
            else:
                spans = [slice(*self.starts[g : g + 2]) for g in range(self.groups)]
                sums.append(np.stack([x[:, span] @ y[0][:, span].T for span in spans]))
        products, magnitudes = self.alpha * sums[0], abs(self.alpha) * sums[1]
        for added in (self.bias, self.c):
            if added is not None:
                products, magnitudes = products + added.astype(np.float64), magnitudes + abs(added.astype(np.float64))
        return products, magnitudes

    def check(self, changes=()):
        d, (expected, magnitudes) = self.run(changes).astype(np.float64), self.expected()
        # Sums in float32, in whatever order, and one rounding of the result; c is added in float32.
        allowed = magnitudes * 2.0**-18 + abs(expected) * float(ml_dtypes.finfo(self.d).eps)
        assert np.isfinite(d).all()
        assert np.max(abs(d - expected) / np.maximum(allowed, 2.0**-100)) <= 1


# By name, as short as what they show allows. The device of the stand-in has two clusters, so a block makes several tiles.
PRODUCTS = {
    "one tile": Product(NONE, 128, 256, 128, by_tile=True, d=BF16),
    "tails": Product(NONE, 300, 520, 400, by_tile=True, d=BF16, bias=True, c=True, alpha=0.75),
    "tails in float32": Product(NONE, 200, 264, 272, by_tile=True, d=F32, bias=True, c=True, alpha=-2.0),
    "tails in float16": Product(NONE, 200, 264, 272, by_tile=True, d=F16, bias=True, c=True),
    "a bias": Product(NONE, 136, 136, 144, by_tile=True, d=BF16, bias=True),
    "a c": Product(NONE, 520, 512, 128, by_tile=True, d=BF16, c=True),
    "groups of rows": Product(ROWS, 640, 264, 272, by_tile=False, d=BF16, sizes=[128, 0, 384, 128], bias=True),
    "groups of rows, by tile": Product(ROWS, 896, 136, 272, by_tile=True, d=BF16, sizes=[128, 256, 0, 128]),
    "groups of rows, with c": Product(ROWS, 768, 136, 144, by_tile=False, d=F32, sizes=[128, 256], c=True),
    "groups of rows, E5M2": Product(ROWS, 512, 264, 128, by_tile=False, d=F16, sizes=[384, 0], a=E5M2),
    "groups of depth": Product(DEPTH, 264, 136, 768, by_tile=False, d=F32, sizes=[384, 0, 128, 256]),
    "groups of depth, by tile": Product(DEPTH, 136, 264, 640, by_tile=True, d=BF16, sizes=[0, 384, 128], c=True),
    "groups of depth, E5M2": Product(DEPTH, 136, 136, 512, by_tile=False, d=BF16, sizes=[256, 128], b=E5M2),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    PRODUCTS[name].check()
