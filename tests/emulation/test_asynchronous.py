"""What the stand-in for CUDA does while threads do other things: copies of boxes, products of a warpgroup, and barriers
that count; and each mistake that it must name."""

import ml_dtypes
import numpy as np
import pytest
from reference import assert_same_bits

from emulation import EmulationError, Result, compile_for_cpu

INCLUDES = '#include "device/warpgroup.cuh"\n#include "device/cluster.cuh"\nusing namespace jax_fp8;\n'
MAP = """
CUtensorMap map_of(const void* data, CUtensorMapDataType type, uint64_t bytes, uint64_t columns, uint64_t rows,
                   unsigned box_rows) {
  void* found;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  CUtensorMap map;
  const cuuint64_t dims[] = {columns, rows, 1}, strides[] = {columns * bytes, columns * rows * bytes};
  const cuuint32_t box[] = {static_cast<unsigned>(128 / bytes), box_rows, 1}, steps[] = {1, 1, 1};
  const CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      &map, type, 3, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) map.data = nullptr;
  return map;
}
"""


def swizzled(box):
    """Rows of 128 bytes: of row r, the piece p of 16 bytes lies at p ^ (r % 8)."""
    rows, pieces = np.indices((box.shape[0], 8))
    return box.reshape(-1, 8, 16)[rows, pieces ^ (rows % 8)].reshape(box.shape)


# A box of 16 rows from (row, column) on, as it lies in shared memory, and back to the same place of y.
COPIES = f"""{INCLUDES}{MAP}
__global__ void kernel(CUtensorMap x, CUtensorMap y, uint8_t* raw, int column, int row) {{
  __shared__ alignas(1024) uint8_t box[2048];
  __shared__ Barrier arrived;
  const int t = threadIdx.x;
  if (t == 0) {{
    start(arrived, 1);
    arrive_and_expect(arrived, 2048);
    load_box(x, {{column, row, 0}}, box, arrived);
  }}
  __syncthreads();
  wait(arrived, 0);
  for (int i = t; i < 2048; i += blockDim.x) raw[i] = box[i];
  publish_to_copies();
  __syncthreads();
  if (t == 0) {{
    store_box(y, {{column, row, 0}}, box);
    commit_stores();
    wait_for_stores();
  }}
}}"""
COPIES_ENTRY = """
extern "C" int run(const float* x, float* y, uint8_t* raw, int64_t columns, int64_t rows, int64_t column, int64_t row) {
  for (int64_t i = 0; i < columns * rows; ++i) y[i] = -1;
  const auto map = [&](const void* data) {
    return map_of(data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, columns, rows, 16);
  };
  if (map(x).data == nullptr) return 1;
  kernel<<<1, 64>>>(map(x), map(y), raw, static_cast<int>(column), static_cast<int>(row));
  return cudaGetLastError();
}"""


def copy(shape, corner, changes=None):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    source = COPIES
    for text, other in changes or ():
        assert text in source
        source = source.replace(text, other)
    kernels = compile_for_cpu(source, COPIES_ENTRY)
    results = [Result(shape, np.float32), Result((16, 128), np.uint8)]
    y, raw = kernels.call("run", x, *results, shape[1], shape[0], corner[1], corner[0])
    return x, y, raw


@pytest.mark.parametrize("corner", [(0, 0), (8, 64), (16, 32), (0, 96), (40, 0), (-4, 0), (0, 128)], ids=str)
def test_a_box_is_swizzled_filled_up_with_zeros_and_clipped(corner):
    x, y, raw = copy((40, 100), corner)
    wanted, filled = np.full_like(x, -1), np.zeros((16, 32), np.float32)
    for row in range(max(corner[0], 0), min(corner[0] + 16, 40)):
        columns = slice(corner[1], min(corner[1] + 32, 100))
        wanted[row, columns] = x[row, columns]
        filled[row - corner[0], : len(x[row, columns])] = x[row, columns]
    assert_same_bits(raw, swizzled(filled.view(np.uint8)))
    assert_same_bits(y, wanted)


@pytest.mark.parametrize(
    ("text", "other", "sentence"),
    [
        ("  wait(arrived, 0);\n", "", "a copy arrives in a block that has ended"),
        ("wait(arrived, 0)", "wait(arrived, 1)", "deadlock.*mbarrier.try_wait"),
        ("arrived, 2048", "arrived, 1024", "deadlock.*mbarrier.try_wait"),
        ("start(arrived, 1)", "start(arrived, 2)", "deadlock.*mbarrier.try_wait"),
        ("    start(arrived, 1);\n", "", "a barrier that was not begun"),
        ("box, arrived);\n", "box + 16, arrived);\n", "a box at"),
        ("    wait_for_stores();\n", "", "ends before what it stores has been read"),
        ("    commit_stores();\n", "", "ends before what it stores has been read"),
        ("    wait_for_stores();\n", "    box[5] ^= 1; wait_for_stores();\n", "order of threads"),
    ],
)
def test_a_mistake_with_copies_is_named(text, other, sentence):
    with pytest.raises(EmulationError, match=sentence):
        copy((40, 100), (8, 32), [(text, other)])


def test_a_matrix_whose_rows_are_not_of_16_bytes_cannot_be_described():
    with pytest.raises(EmulationError, match="CUDA error 1"):
        copy((40, 101), (0, 0))


# 64 x 128 sums of 64 products, in two steps along k, of what lies in shared memory; every thread writes down its sums.
PRODUCTS = f"""{INCLUDES}
template <Fp8Type kA, Fp8Type kB>
__global__ void kernel(const uint8_t* a, const uint8_t* b, float* sums) {{
  extern __shared__ uint8_t left[];  // a descriptor names nothing else here
  uint8_t* const right = left + 64 * 128;
  const int t = threadIdx.x;
  for (int i = t; i < 64 * 128; i += 128) left[i] = a[i];
  for (int i = t; i < 128 * 128; i += 128) right[i] = b[i];
  __syncthreads();
  Products products;
  begin_products();
  for (int i = 1; i < 3; ++i) {{
    multiply<kA, kB>(products, rows_in_shared(left) + 2 * i, rows_in_shared(right) + 2 * i, i > 1);
  }}
  commit_products();
  wait_for_products<0>();
  for (int i = 0; i < 64; ++i) sums[t * 64 + i] = products.of[i];
}}"""
PRODUCTS_ENTRY = """extern "C" int run(const uint8_t* a, const uint8_t* b, int64_t types, float* sums) {
  constexpr Fp8Type kE4M3 = Fp8Type::kE4M3, kE5M2 = Fp8Type::kE5M2;
  const auto kernel_of = types == 0 ? kernel<kE4M3, kE4M3> : types == 1 ? kernel<kE5M2, kE4M3> : kernel<kE4M3, kE5M2>;
  kernel_of<<<1, 128, 192 * 128>>>(a, b, sums);
  return cudaGetLastError();
}"""
TYPES = [
    (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
    (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


def multiplied(types, change=("", "")):
    random = np.random.default_rng(types)
    a, b = (random.integers(-4, 5, (rows, 128)).astype(t) for rows, t in zip((64, 128), TYPES[types], strict=True))
    kernels = compile_for_cpu(PRODUCTS.replace(*change), PRODUCTS_ENTRY)
    in_shared = (swizzled(side.view(np.uint8)) for side in (a, b))
    (sums,) = kernels.call("run", *in_shared, types, Result((4, 8, 4, 16, 2, 2), np.float32))
    # By warp, row of eight, pair of columns of eight, eight columns, upper or lower eight rows, column of the pair.
    got = sums.transpose(0, 4, 1, 3, 2, 5).reshape(64, 128)
    return got, a.astype(np.float32)[:, 32:96] @ b.astype(np.float32)[:, 32:96].T


@pytest.mark.parametrize("types", range(3))
def test_products_of_a_warpgroup(types):
    got, wanted = multiplied(types)
    assert_same_bits(got, wanted)  # of small integers, so they are exact


@pytest.mark.parametrize(
    ("text", "other", "sentence"),
    [
        ("  begin_products();\n", "", "wgmma without a fence before"),
        ("  commit_products();\n", "", "before it has waited for its products"),
        ("  wait_for_products<0>();\n", "", "before it has waited for its products"),
        ("wait_for_products<0>", "wait_for_products<1>", "before it has waited for its products"),
        ("+ 2 * i, i > 1", "+ 2 * i, i > 1 || t == 77", "must ask for one product"),
        ("  wait_for", "  if (t != 5) wait_for", "before it has waited for its products|deadlock"),
        ("rows_in_shared(left) + 2 * i", "(rows_in_shared(left) ^ uint64_t{1} << 62)", "that are swizzled"),
        ("rows_in_shared(left) + 2 * i", "rows_in_shared(left) + 4096", "outside of shared memory"),
    ],
)
def test_a_mistake_with_products_is_named(text, other, sentence):
    assert text in PRODUCTS
    with pytest.raises(EmulationError, match=sentence):
        multiplied(0, (text, other))


def test_products_that_are_not_waited_for_are_no_numbers():
    late = "  wait_for_products<0>();\n"
    early = f"  float early = products.of[5];\n{late}  products.of[5] = early;\n"
    got, wanted = multiplied(0, (late, early))
    assert np.isnan(got).sum() == 128
    assert_same_bits(got[~np.isnan(got)], wanted[~np.isnan(got)])


# Each block of two copies eight rows to both; a barrier of the first is told by threads of both. Then every lane of a
# warp loads a row's part of four matrices and stores them the other way round: the last matrix first.
TOGETHER = f"""{INCLUDES}{MAP}
__global__ void kernel(CUtensorMap x, uint8_t* raw, uint32_t* turned) {{
  extern __shared__ uint8_t boxes[];
  __shared__ Barrier arrived;
  __shared__ Barrier told;
  const int t = threadIdx.x, block = blockIdx.x;
  if (t == 0) {{
    start(arrived, 1);
    start(told, 2 * 32);
    publish_barriers();
    arrive_and_expect(arrived, 2048);
  }}
  __syncthreads();
  arrive_at_cluster();
  wait_for_cluster();
  if (t == 0) load_box(x, {{0, block * 8, 0}}, boxes + block * 1024, arrived, 3);
  wait(arrived, 0);
  for (int i = t; i < 2048; i += 32) raw[block * 2048 + i] = boxes[i];
  arrive_in_block(told, 0);
  if (block == 0) wait(told, 0);
  asm volatile("bar.sync %0, %1;" ::"r"(1), "n"(32) : "memory");
  uint32_t m[4];
  const uint32_t at = shared_address(boxes + t * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
  for (int i = 0; i < 4; ++i) turned[(block * 4 + i) * 32 + t] = m[i];
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1, %2, %3, %4}};" ::"r"(at), "r"(m[3]), "r"(m[2]),
               "r"(m[1]), "r"(m[0]) : "memory");
  __syncthreads();
  for (int i = t; i < 512; i += 32) raw[4096 + block * 512 + i] = boxes[i];
  arrive_at_cluster();
  wait_for_cluster();
}}"""
TOGETHER_ENTRY = """extern "C" int run(const uint8_t* x, uint8_t* raw, uint32_t* turned) {
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension};
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{.gridDim = dim3(2), .blockDim = dim3(32), .dynamicSmemBytes = 2048, .attrs = &attribute,
                            .numAttrs = 1};
  return cudaLaunchKernelEx(&config, kernel, map_of(x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 128, 16, 8), raw, turned);
}"""


def together(change=("", "")):
    x = np.random.default_rng(0).integers(0, 256, (16, 128), dtype=np.uint8)
    kernels = compile_for_cpu(TOGETHER.replace(*change), TOGETHER_ENTRY)
    results = Result((5120,), np.uint8), Result((2, 4, 8, 4), np.uint32)
    return x, *kernels.call("run", x, *results)


def test_blocks_copy_to_each_other_and_lanes_hold_matrices():
    x, raw, held = together()
    boxes = swizzled(x)
    assert_same_bits(raw[:4096].reshape(2, 16, 128), np.stack([boxes, boxes]))
    matrices = boxes.reshape(-1)[:512].reshape(4, 8, 16)
    assert_same_bits(held, np.stack([matrices.view(np.uint32)] * 2))
    assert_same_bits(raw[4096:].reshape(2, 4, 8, 16), np.stack([matrices[::-1]] * 2))


@pytest.mark.parametrize(
    ("text", "other", "sentence"),
    [
        ("arrived, 3)", "arrived, 1)", "deadlock.*mbarrier.try_wait"),
        ("arrived, 3)", "arrived, 7)", "block 2 of a cluster of 2"),
        ("block * 1024, arrived", "0, arrived", "order of threads"),
        ("(told, 0);\n  if", "(told, block);\n  if", "deadlock.*mbarrier.try_wait"),
        (
            "start(told, 2 * 32)",
            "start(told, 32)",
            "an arrival that nobody expects|has ended|deadlock|order of threads",
        ),
        ('"r"(1), "n"(32)', '"r"(1), "n"(64)', "deadlock.*bar.sync"),
        ('"r"(1), "n"(32)', '"r"(16), "n"(32)', "barrier 16"),
        ("(boxes + t * 16)", "(boxes + t * 12)", "a row at"),
        ("  arrive_at_cluster();\n  wait_for_cluster();\n  if", "  if", "has not begun"),
    ],
)
def test_a_mistake_of_blocks_is_named(text, other, sentence):
    assert text in TOGETHER
    with pytest.raises(EmulationError, match=sentence):
        together((text, other))


# Every thread sends a pair of words to the other block of two, whose barrier counts the bytes.
PAIRS = f"""{INCLUDES}
__global__ void kernel(uint2* got) {{
  __shared__ uint2 pairs[32];
  __shared__ Barrier complete;
  const unsigned t = threadIdx.x, block = blockIdx.x;
  if (t == 0) start(complete, 1);
  arrive_at_cluster();
  wait_for_cluster();
  send(make_uint2(block, t), pairs + t, complete, 1 - block);
  if (t == 0) arrive_and_expect(complete, 32 * sizeof(*got));
  wait(complete, 0);
  got[block * 32 + t] = pairs[31 - t];
}}"""
PAIRS_ENTRY = """extern "C" int run(void* got) {
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension};
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{.gridDim = dim3(2), .blockDim = dim3(32), .attrs = &attribute, .numAttrs = 1};
  return cudaLaunchKernelEx(&config, kernel, static_cast<uint2*>(got));
}"""


def sent(change=("", ""), words=2):
    kernel, entry = (text.replace("uint2", f"uint{words}") for text in (PAIRS.replace(*change), PAIRS_ENTRY))
    return compile_for_cpu(kernel, entry).call("run", Result((2, 32, words), np.uint32))[0]


@pytest.mark.parametrize("words", [2, 4])
def test_words_are_sent_to_another_block(words):
    found = sent(("(block, t)", f"(block{', t' * (words - 1)})"), words)
    assert_same_bits(found[:, :, 0], np.repeat([[1], [0]], 32, axis=1).astype(np.uint32))
    assert_same_bits(found[:, :, 1:], np.tile(np.arange(32, dtype=np.uint32)[::-1, None], (2, 1, words - 1)))


@pytest.mark.parametrize(
    ("text", "other", "sentence"),
    [
        ("  wait(complete, 0);\n", "", "arrives in a block that has ended|has ended|order of threads"),
        ("complete, 32", "complete, 31", "deadlock.*mbarrier.try_wait|has ended"),
        ("complete, 32", "complete, 33", "deadlock.*mbarrier.try_wait"),
        ("complete, 1 - block", "complete, 2", "block 2 of a cluster of 2"),
        ("complete, 1 - block", "complete, 0", "deadlock|has ended"),
        ("  if (t == 0) start(complete, 1);\n", "", "a barrier that was not begun"),
        ("  arrive_at_cluster();\n  wait_for_cluster();\n", "", "has not begun"),
        ("  got[", "  send(make_uint2(7, 7), pairs + t, complete, block);\n  got[", "order of threads|has ended"),
    ],
)
def test_a_mistake_with_pairs_is_named(text, other, sentence):
    assert text in PAIRS
    with pytest.raises(EmulationError, match=sentence):
        sent((text, other))
