"""csrc/grouped_gemm.cu on the CPU: copies, barriers and tensor cores as tests/emulation has them, against float64."""

import ml_dtypes
import numpy as np
import pytest
from emulation import ORDERS, EmulationError, InPlace, Result, compile_for_cpu, planted

NONE, ROWS, DEPTH = range(3)  # in the order of Groups
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
E4M3, E5M2 = FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]  # in the order of Fp8Type
F32, BF16, F16 = SOURCES

ENTRY = """
extern "C" int grouped_gemm(int64_t kind, int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_type,
                            int64_t b_type, int64_t by_tile, int64_t d_type, double alpha, const void* a,
                            const void* b, const float* a_scale, const float* b_scale, const void* bias, const void* c,
                            const int32_t* starts, void* d, int64_t side_by_side, int64_t in_place) {
  using namespace jax_fp8;
  using namespace jax_fp8::grouped_gemm;
  const ProductShape shape = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), static_cast<int>(groups)};
  const Problem problem = {static_cast<Groups>(kind),     shape,        static_cast<Fp8Type>(a_type),
                           static_cast<Fp8Type>(b_type),  by_tile != 0, static_cast<SourceType>(d_type),
                           static_cast<float>(alpha),     side_by_side != 0};
  const Operands operands = {a, b, a_scale, b_scale, bias, in_place != 0 ? d : c, starts, d};
  const std::string error = enqueue(problem, operands, nullptr);
  return error.empty() ? 0 : 1;
}
extern "C" int fail_searches(int64_t times) {
  emulation_failing_searches = static_cast<int>(times);
  return 0;
}
"""


def filled_up(size):
    return -(-size // 4) * 4


class Product:
    """One call: its operands, made at random, and what it must make of them."""

    def __init__(
        self, kind, m, n, k, *, by_tile, d, sizes=None, a=E4M3, b=E4M3, bias=False, c=False, alpha=1.0,
        side_by_side=False, in_place=False,
    ):  # fmt: skip
        self.side_by_side, self.in_place = side_by_side, in_place  # matrices of b; the result over c
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

    def run(self, changes=(), orders=tuple(ORDERS)):
        b = np.ascontiguousarray(self.b.swapaxes(0, 1)) if self.side_by_side else self.b
        c = None if self.in_place else self.c
        operands = [self.a, b, self.a_scale, self.b_scale, self.bias, c, self.starts]
        types = [FP8.index(self.a.dtype), FP8.index(self.b.dtype), self.by_tile, SOURCES.index(self.d), self.alpha]
        result = Result((self.groups if self.kind == DEPTH else 1, self.m, self.n), self.d)
        result = InPlace(self.c) if self.in_place else result
        kernels = compile_for_cpu("grouped_gemm.cu", ENTRY, changes)
        shape = (self.kind, self.m, self.n, self.k, self.groups)
        switches = self.side_by_side, self.in_place
        (d,) = kernels.call("grouped_gemm", *shape, *types, *operands, result, *switches, orders=orders)
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


# As small as what they show allows. The device of the stand-in has two clusters, so a block makes several tiles.
PRODUCTS = {
    "one tile": Product(NONE, 128, 256, 128, by_tile=True, d=BF16),
    "tails": Product(NONE, 300, 520, 400, by_tile=True, d=BF16, bias=True, c=True, alpha=0.75),
    "tails in float32": Product(NONE, 200, 264, 272, by_tile=True, d=F32, bias=True, c=True, alpha=-2.0),
    "tails in float16": Product(NONE, 200, 264, 272, by_tile=True, d=F16, bias=True, c=True),
    "a bias": Product(NONE, 136, 136, 144, by_tile=True, d=BF16, bias=True),
    "a c": Product(NONE, 520, 512, 128, by_tile=True, d=BF16, c=True),
    "groups of rows": Product(ROWS, 640, 264, 272, by_tile=False, d=BF16, sizes=[128, 0, 128, 128], bias=True),
    "groups of rows, by tile": Product(ROWS, 896, 136, 272, by_tile=True, d=BF16, sizes=[128, 256, 0, 128]),
    "matrices side by side": Product(ROWS, 640, 264, 272, by_tile=False, d=BF16, sizes=[128, 0, 256],
        side_by_side=True),
    "matrices side by side, by tile": Product(ROWS, 640, 136, 272, by_tile=True, d=F32, sizes=[256, 128, 0],
        side_by_side=True),
    "groups of rows, with c": Product(ROWS, 768, 136, 144, by_tile=False, d=F32, sizes=[128, 256], c=True),
    "groups of rows, E5M2": Product(ROWS, 512, 264, 128, by_tile=False, d=F16, sizes=[384, 0], a=E5M2),
    "groups of depth": Product(DEPTH, 264, 136, 768, by_tile=False, d=F32, sizes=[384, 0, 128, 256]),
    "groups of depth, by tile": Product(DEPTH, 136, 264, 640, by_tile=True, d=BF16, sizes=[0, 384, 128], c=True),
    "groups of depth, in place": Product(DEPTH, 264, 136, 768, by_tile=False, d=F32, sizes=[384, 0, 128], b=E5M2,
        c=True, alpha=0.25, in_place=True),
    "groups of depth, E5M2": Product(DEPTH, 136, 136, 512, by_tile=False, d=BF16, sizes=[256, 128], b=E5M2),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    PRODUCTS[name].check()


# A product that shows it, what is wrong then, and what the harness says where not only numbers are wrong.
KERNEL, RESULTS = "device/grouped_gemm.cuh", "device/grouped_gemm_results.cuh"
MAPS = "tensor_map.h"
SHARED, WARPGROUP, LAUNCH = "device/grouped_gemm_shared.cuh", "device/warpgroup.cuh", "grouped_gemm.cu"
MISTAKES = {
    # Where matrices lie.
    "one after the other": ("matrices side by side", MAPS, "extent.side_by_side ? extent.matrices : 1", "1"),
    "matrices in the place of rows": ("matrices side by side", MAPS, "extent.side_by_side ? 1 : extent.rows",
        "extent.rows"),
    # Stages: who waits for whom.
    "no wait for the first stage": ("one tile", KERNEL,
        "    wait(shared.filled[turn.stage], turn.parity);\n  }\n  for", "  }\n  for"),
    "no wait for the next stage": ("tails", KERNEL,
        "      } else if (step + 1 < steps) {\n        wait(shared.filled[turn.stage], turn.parity);\n", ""),
    "no wait, one scale": ("groups of depth", KERNEL,
        "turn.parity);\n    hold(sums);", "turn.parity ^ 1);\n    hold(sums);"),
    "no wait for a free stage": ("tails", KERNEL, "wait(shared.emptied[turn.stage], turn.parity ^ 1);", ""),
    "no release": ("tails", KERNEL,
        "      if (half == kHalves - 1) release(shared, now.stage);\n", "", "deadlock.*try_wait"),
    "a release before the products": ("tails", KERNEL, "half == kHalves - 1) release", "half == 0) release"),
    "a release of the next stage": ("tails", KERNEL, "release(shared, now.stage)", "release(shared, turn.stage)"),
    "a release in one block": ("tails", KERNEL,
        "threadIdx.x % 32 < 2) arrive", "threadIdx.x % 32 < 1) arrive", "deadlock"),
    "the parity of the copies": ("tails", KERNEL, "turn.parity ^ 1);", "turn.parity);", "deadlock"),
    "a parity that stays": ("tails", KERNEL, "stage = 0, parity ^= 1", "stage = 0"),
    "arrivals of one block": ("tails", KERNEL, "2 * 4 * kWarpgroups", "4 * kWarpgroups"),
    "fewer bytes announced": ("one tile", KERNEL, "(filled, sizeof(Stage))", "(filled, sizeof(Stage) / 2)"),
    "no end in common": ("tails", KERNEL, "its barriers\n  wait_for_cluster();\n#else", "its barriers\n#else"),
    "no start in common": ("tails", KERNEL, "  arrive_at_cluster();\n  wait_for_cluster();\n  if", "  if"),
    # What is copied and how it is read.
    "half of b is not shared": ("tails", KERNEL,
        "stage.b[block], filled, kBoth)", "stage.b[block], filled)", "deadlock"),
    "one half of b twice": ("tails", KERNEL, "tile.column + block * kColumnsOfProduct", "tile.column"),
    "always shared": ("groups of rows, by tile", KERNEL, "if (tile.shares_b)", "if (true)"),
    "b of the first group": ("groups of rows", KERNEL,
        "kColumnsOfProduct, tile.b_matrix};\n          load_box", "kColumnsOfProduct, 0};\n          load_box"),
    "a of the first warpgroup": ("tails", KERNEL, "stages[0].a[warpgroup]", "stages[0].a[0]"),
    "a step along k too short": ("one tile", KERNEL, "kUnits = kDepthOfProduct / 16", "kUnits = 1"),
    "rows eight by eight too close": ("one tile", WARPGROUP, "1024 >> 4", "512 >> 4", "boxes of 128 bytes"),
    "products do not add up": ("one tile", KERNEL, "adds || i > 0", "adds"),
    "sums begin anew": ("groups of depth", KERNEL, "(turn.stage, half), true)", "(turn.stage, half), false)"),
    "no fence": ("one tile", KERNEL, "      begin_products();\n", "", "wgmma without a fence"),
    "no commit": ("one tile", KERNEL, "      commit_products();\n", "", "waited for its products"),
    "no wait for products": ("one tile", KERNEL, "      wait_for_products<0>();\n", ""),
    "E5M2 read as E4M3": ("groups of rows, E5M2", LAUNCH, "kE5M2, kE4M3, kByTile>", "kE4M3, kE4M3, kByTile>"),
    # Scales.
    "scales of the next row": ("tails", KERNEL, "% 32 / 4;\n    const int step", "% 32 / 4 + 1;\n    const int step"),
    "scales of the row above": ("tails", KERNEL, "shape.m ? 8 : 0", "shape.m ? 0 : 0"),
    "scales behind the last row": ("tails", KERNEL, "min(row, shape.m - 1)", "row", "argument"),
    "a row of scales too short": ("tails", LAUNCH, ".b_scale_row = filled_up(steps)", ".b_scale_row = steps + 1"),
    "scales of the first half": ("tails", KERNEL,
        "scales.rows[1] * scales.halves[half]", "scales.rows[1] * scales.halves[0]"),
    "scales of the first group": ("groups of rows, by tile", KERNEL, "tile.b_matrix * arguments.b_scale_matrix + ", ""),
    "scales from the first step on": ("groups of depth, by tile", KERNEL,
        "step = tile.first_depth / kTileDepth", "step = 0"),
    "scales a step late": ("tails", KERNEL, "    ++halves_;\n", ""),
    # What becomes of the sums.
    "rows of no group": ("groups of rows", KERNEL, "if (!tile.has_group) clear(sums);", ""),
    "no alpha": ("tails", KERNEL, "arguments.alpha * scale", "scale"),
    "bias of the other half": ("tails", RESULTS, "bias_[in_tile / 2 + 4", "bias_[in_tile / 2 % 64 + 4"),
    "bias once": ("a bias", RESULTS, "bias.x), fmaf(sum[1], factor, bias.y)}", "bias.x), sum[1] * factor}"),
    "c is not added": ("a c", RESULTS, "if constexpr (kHasC) d = {d.x + c.x, d.y + c.y};", ""),
    "no wait for c": ("a c", RESULTS, "        wait(c_arrived_, c_parity_);\n", ""),
    "one parity of c": ("a c", RESULTS, "        c_parity_ ^= 1;\n", ""),
    "c over what is stored": ("a c", RESULTS, "return;\n    wait_for_stores_to_read();", "return;"),
    "results over what is stored": ("groups of depth", RESULTS,
        "if (is_first_ && !arguments_.has_c) wait_for_stores_to_read();", ""),
    "no barrier before filling": ("groups of depth", RESULTS, "to_read();\n      meet_in(warpgroup_);", "to_read();"),
    "no barrier after filling": ("tails", RESULTS, "to_copies();\n      meet_in(warpgroup_);", "to_copies();"),
    "stores that are not waited for": ("one tile", RESULTS,
        "if (is_first_) wait_for_stores();", "", "ends before what it stores"),
    "stores that are not committed": ("one tile", RESULTS,
        "        commit_stores();\n", "", "ends before what it stores"),
    "one barrier for both": ("a c", RESULTS, '"r"(warpgroup + 1)', '"r"(1)'),
    "a result not swizzled": ("tails", RESULTS, "(byte ^ row % 8 * 16)", "byte"),
    "a result in float32 not swizzled": ("tails in float32", RESULTS, "(byte ^ row % 8 * 16)", "byte"),
    "columns of the first box": ("tails", RESULTS, "tile.column + first + box * kBoxColumns<D>", "tile.column + first"),
    "all results in the first": ("groups of depth", RESULTS, "row, tile.d_matrix}", "row, 0}"),
    # The launch.
    "half of the shared memory": ("one tile", SHARED, "sizeof(Shared) + 1024;", "sizeof(Shared) / 2;"),
    "boxes of results too high": ("tails", LAUNCH,
        "size, extent, kRowsOfWarpgroup);\n  if (!", "size, extent, kTileRows);\n  if (!"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    sentence = change[3] if len(change) > 3 else None
    with pytest.raises(EmulationError if sentence else (AssertionError, EmulationError), match=sentence):
        PRODUCTS[name].check((tuple(change[:3]),))


def test_a_search_of_the_driver_that_failed_is_repeated():
    """In a library of its own, where none was found before: the change is one of its text only."""
    product = Product(ROWS, 128, 16, 128, by_tile=False, d=F32, sizes=[128])
    anew = (("tensor_map.h", "std::atomic<Encode> kept", "std::atomic<Encode>  kept"),)
    kernels = compile_for_cpu("grouped_gemm.cu", ENTRY, anew)
    kernels.call("fail_searches", 1, orders=["forward"])
    with pytest.raises(EmulationError, match="the launch must succeed"):
        product.run(anew, orders=["forward"])
    product.run(anew, orders=["forward"])
