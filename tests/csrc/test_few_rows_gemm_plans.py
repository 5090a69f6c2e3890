"""How csrc/few_rows_gemm_plans.h divides products among the multiprocessors of an H200: like the fastest plans that
searches found there, and so that every plan fits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from emulation import Result, compile_for_cpu

ENTRY = """
extern "C" int choose(int64_t m, int64_t n, int64_t k, int64_t has_warpgroups, int64_t* found) {
  using namespace jax_fp8;
  using namespace jax_fp8::few_rows_gemm;
  Problem problem{static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), false, Scaling::kOne,
                  SourceType::kBFloat16, 1.0f, 0};
  problem.preparation = {.normalizes = k <= kMostNormalizedDepth, .casts = true, .epsilon = 1e-5f};
  const Device device{132, 227 * 1024 - 2048, true, has_warpgroups != 0};
  const auto plan = plan_of(problem, device);
  if (!plan) return 1;
  const Course course = course_of(problem, *plan);
  const Layout layout = layout_of(problem, *plan);
  found[0] = course.stages * 100'000'000ll + plan->step_chunks * 10'000'000ll + plan->cluster * 10'000 +
             plan->row_tiles * 1000 + std::min(plan->row_warps, 9) * 100 + plan->depth_warps;
  found[1] = layout.bytes, found[2] = blocks_of(problem, *plan), found[3] = layout.stage * course.stages;
  return 0;
}
"""
MODELS = {
    "gpt3-1.3b": {"up": (8192, 2048), "down": (2048, 8192), "qkv": (6144, 2048), "out": (2048, 2048)},
    "llama3.2-1b": {"up": (16384, 2048), "down": (2048, 8192), "qkv": (3072, 2048), "out": (2048, 2048)},
    "llama3-8b": {"up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "out": (4096, 4096)},
}
# Where a search found blocks of other rows of b no more than 1 % faster.
AS_FAST = [("gpt3-1.3b", 16, "up"), ("llama3-8b", 64, "up")]
SEARCHED = json.loads((Path(__file__).parents[2] / "benchmarks/results/decoding_layers.json").read_text())["searched"]


def choose(m, n, k, has_warpgroups=True):
    """The digits of a plan, bytes of shared memory, blocks, and bytes of the ring."""
    kernels = compile_for_cpu("few_rows_gemm.cu", ENTRY)
    return kernels.call("choose", m, n, k, has_warpgroups, Result((4,), np.int64), orders=["forward"])[0].tolist()


def parts_of(digits):
    """Stages, chunks of a step, blocks that share k, warps along n (9: 16 of them) and along k."""
    return digits // 10**8, digits // 10**7 % 10, digits // 10**4 % 10, digits // 100 % 10, digits % 100


def test_plans_that_were_the_fastest():
    assert choose(1, 8192, 2048)[0] == choose(1, 16384, 2048)[0] == choose(8, 16384, 2048)[0] == 320011402
    assert choose(8, 8192, 2048)[0] == 240011402
    assert choose(8, 2048, 8192)[0] == 320081401
    assert choose(4, 2048, 8192)[0] == 320041402
    assert choose(8, 6144, 2048)[0] == choose(4, 2048, 2048)[0] == 140011404
    assert choose(1, 28672, 4096)[0] == choose(8, 28672, 4096)[0] == 120011802
    assert choose(8, 6144, 4096)[0] == 420011402
    assert choose(64, 2048, 8192)[0] == 320021402
    assert choose(64, 4096, 4096)[0] == 320011402
    assert choose(64, 16384, 2048)[0] == 220011802


@pytest.mark.parametrize("row", SEARCHED, ids=lambda row: f"{row['model']}, {row['rows']} rows")
def test_plans_are_like_those_that_a_search_found(row):
    """As many rows of b in a block, and at most twice or half as many blocks that share k."""
    for gemm, searched in row["plans"].items():
        if searched == 0:  # the rule's own
            continue
        _, _, cluster, row_warps, _ = parts_of(choose(row["rows"], *MODELS[row["model"]][gemm])[0])
        _, _, searched_cluster, searched_row_warps, _ = parts_of(searched)
        assert row_warps == searched_row_warps or (row["model"], row["rows"], gemm) in AS_FAST
        assert searched_cluster / 2 <= cluster <= 2 * searched_cluster


@pytest.mark.parametrize("has_warpgroups", [True, False])
def test_every_product_of_these_models_has_a_plan_that_fits(has_warpgroups):
    for m in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64) if has_warpgroups else (1, 2, 5, 8):
        for n, k in [(16, 16), (48, 272), (768, 3072), (53248, 16384), (8192, 28672), *MODELS["gpt3-1.3b"].values()]:
            if not has_warpgroups and k > 8192:  # rows that a block cannot hold; see `FewRows.fits`
                continue
            _, shared_bytes, blocks, ring_bytes = choose(m, n, k, has_warpgroups)
            assert 0 < ring_bytes < shared_bytes <= 227 * 1024 - 2048 and blocks > 0


# Of a multiprocessor, beside what the system and the kernels themselves reserve of each block.
ROOM_OF_TWO = 228 * 1024 - 2 * (1024 + 1040)


def test_small_rings_leave_room_for_the_next_kernel():
    """Two kernels of 1.3B with up to 4 rows share a multiprocessor where every one of these has a block."""
    for m in (1, 4):
        for n, k in (MODELS["gpt3-1.3b"]["up"], MODELS["gpt3-1.3b"]["down"]):
            _, shared_bytes, blocks, _ = choose(m, n, k)
            assert 100 < blocks <= 132 and 2 * shared_bytes <= ROOM_OF_TWO


def test_large_clusters_all_run_at_once():
    """Where clusters of four or more need almost every multiprocessor, one of these has room for two of their blocks:
    a GPC has 16 or 18 multiprocessors, and a cluster does not reach beyond it.
    """
    found = 0
    for m in range(1, 17):
        for n, k in [(2048, 8192), (1024, 16384), (1024, 28672), (2048, 28672)]:
            digits, shared_bytes, blocks, _ = choose(m, n, k)
            if parts_of(digits)[2] > 2 and blocks > 112:
                found += 1
                assert 2 * shared_bytes <= ROOM_OF_TWO
    assert found > 30


def test_large_blocks_are_for_many_rows_and_one_scale():
    assert parts_of(choose(64, 28672, 4096)[0])[3] == parts_of(choose(33, 28672, 4096)[0])[3] == 9
    assert parts_of(choose(32, 28672, 4096)[0])[3] == 8
