"""csrc/device/grouped_gemm_tiles.cuh on the CPU: which tile every block makes, against what is said there."""

import itertools

import numpy as np
import pytest
from emulation import EmulationError, Result, compile_for_cpu, planted

NONE, ROWS, DEPTH = range(3)  # in the order of Groups
SOURCE = '#include "device/grouped_gemm_tiles.cuh"'
ENTRY = """
template <jax_fp8::Groups kGroups>
int write_tiles(const jax_fp8::GemmTiles<kGroups>& tiles, int32_t* pairs, int32_t* made) {
  *pairs = tiles.pairs();
  for (int i = 0; i < 2 * *pairs; ++i) {
    const jax_fp8::GemmTile tile = tiles.tile(i / 2, i % 2);
    for (int field : {tile.row, tile.column, tile.d_matrix, tile.b_matrix, tile.first_depth, tile.end_depth,
                      int{tile.has_group}, int{tile.shares_b}}) {
      *made++ = field;
    }
  }
  return 0;
}

extern "C" int tiles(int64_t kind, int64_t m, int64_t n, int64_t k, int64_t groups, const int32_t* starts,
                     int32_t* pairs, int32_t* made) {
  using namespace jax_fp8;
  const ProductShape shape = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), static_cast<int>(groups)};
  if (kind == 0) return write_tiles(GemmTiles<Groups::kNone>{shape, nullptr}, pairs, made);
  if (kind == 1) return write_tiles(GemmTiles<Groups::kRows>{shape, starts}, pairs, made);
  return write_tiles(GemmTiles<Groups::kDepth>{shape, starts}, pairs, made);
}
"""
FIELDS = ("row", "column", "d_matrix", "b_matrix", "first_depth", "end_depth", "has_group", "shares_b")

# Kind, m, n, k, and the size of every group. In whole tiles, with tails, and of more bands than one, the last not full.
CASES = {
    "one tile": (NONE, 128, 256, 128, None),
    "tails": (NONE, 300, 520, 400, None),
    "a row": (NONE, 1, 1, 1, None),
    "a whole band": (NONE, 2048, 768, 128, None),
    "bands": (NONE, 5000, 1000, 128, None),
    "all rows in one group": (ROWS, 512, 520, 256, [512]),
    "all rows in the second group": (ROWS, 512, 256, 256, [0, 512, 0]),
    "groups of 128 rows": (ROWS, 640, 256, 384, [128] * 5),
    "rows behind the last group": (ROWS, 1152, 300, 128, [256, 0, 128, 384]),
    "no rows in any group": (ROWS, 256, 256, 128, [0, 0]),
    "empty groups at both ends": (ROWS, 768, 256, 128, [0, 0, 384, 0, 256, 0]),
    "groups in bands": (ROWS, 4608, 512, 128, [1920, 0, 128, 1280, 640]),
    "one group along k": (DEPTH, 128, 256, 512, [512]),
    "groups along k": (DEPTH, 300, 520, 1024, [256, 0, 128, 384]),
    "groups along k, in bands": (DEPTH, 2304, 300, 384, [0, 128, 256]),
}


def tiles_of(case, changes=()):
    """By field of GemmTile, (pairs, blocks) integers; and the starts of groups."""
    kind, m, n, k, sizes = CASES[case]
    starts = None if sizes is None else np.cumsum([0, *sizes]).astype(np.int32)
    groups = 1 if sizes is None else len(sizes)
    most = -(-m // 256) * -(-n // 256) * (groups if kind == DEPTH else 1)
    kernels = compile_for_cpu(SOURCE, ENTRY, changes)
    results = [Result((), np.int32), Result((most, 2, len(FIELDS)), np.int32)]
    pairs, made = kernels.call("tiles", kind, m, n, k, groups, starts, *results)
    assert pairs == most
    return {field: made[..., number] for number, field in enumerate(FIELDS)}, starts


def check_places(case, tile):
    """Every tile of every matrix once: down a band of 2,048 rows, then to the right, then the next band."""
    kind, m, n, _, sizes = CASES[case]
    rows, columns = -(-m // 256) * 256, -(-n // 256) * 256
    matrices = len(sizes) if kind == DEPTH else 1
    wanted = [
        (matrix, row, column)
        for matrix, band in itertools.product(range(matrices), range(0, rows, 2048))
        for column in range(0, columns, 256)
        for row in range(band, min(band + 2048, rows), 128)
    ]
    places = np.stack([tile["d_matrix"], tile["row"], tile["column"]], -1).reshape(-1, 3)
    assert len(set(wanted)) == len(wanted) == matrices * (rows // 128) * (columns // 256)
    np.testing.assert_array_equal(places, wanted)


def check_groups(case, tile, starts):
    kind, _, _, k, _ = CASES[case]
    if kind == ROWS:
        last = len(starts) - 2
        group = np.array([[np.sum(starts[1:] <= row) for row in pair] for pair in tile["row"]])
        matrix, some = np.minimum(group, last), (group <= last).any(1, keepdims=True)
        steps, shares = (0, np.where(some, k, 0)), matrix[:, :1] == matrix[:, 1:]
        has_group = group <= last
    else:
        matrix, has_group, shares = 0, True, True
        steps = (starts[tile["d_matrix"]], starts[tile["d_matrix"] + 1]) if kind == DEPTH else (0, k)
    wanted = zip(FIELDS[3:], (matrix, *steps, has_group, shares), strict=True)
    for field, values in wanted:
        np.testing.assert_array_equal(tile[field], np.broadcast_to(values, tile["row"].shape), field)


def check(case, changes=()):
    tile, starts = tiles_of(case, changes)
    check_places(case, tile)
    check_groups(case, tile, starts)
    # What the blocks of a cluster share has the same place for both, and both wait for as many steps.
    for field in ("column", "d_matrix", "first_depth", "end_depth", "shares_b"):
        np.testing.assert_array_equal(tile[field][:, 0], tile[field][:, 1], field)


@pytest.mark.parametrize("case", CASES)
def test_every_block_makes_its_tile(case):
    check(case)


def test_blocks_of_a_cluster_may_need_different_matrices():
    """Else nothing would be known of the field that tells them apart."""
    shares = {case: tiles_of(case)[0]["shares_b"] for case in CASES}
    assert not shares["groups of 128 rows"][:2].any()
    assert shares["groups of 128 rows"][2].all()  # of the last two, one is behind all groups
    assert shares["all rows in one group"].all()


FILE = "device/grouped_gemm_tiles.cuh"
MISTAKES = {
    "bands as high as the first": ("bands", "rest < kBand ? rest : kBand", "kBand"),
    "columns as wide as the first band": ("bands", "in_band / height * kTileColumns", "in_band / kBand * kTileColumns"),
    "both blocks make one tile": ("one tile", "first_row + block * kTileRows", "first_row"),
    "one product of all": ("groups along k", " * (kGroups == Groups::kDepth ? shape.groups : 1)", ""),
    "all results are the first": ("groups along k", "tile.d_matrix = matrix", "tile.d_matrix = 0"),
    "to the end of k": ("groups along k", "tile.end_depth = starts[matrix + 1]", "tile.end_depth = shape.k"),
    "the group that ends there": ("groups of 128 rows", "starts[middle + 1] <= row", "starts[middle + 1] < row"),
    "empty groups count": ("all rows in the second group", "starts[middle + 1] <= row", "starts[middle] < row"),
    "every row has a group": ("rows behind the last group", "has_group = group <= last", "has_group = true"),
    "no such matrix": ("rows behind the last group", "tile.has_group ? group : last", "group"),
    "a half of what is not shared": ("groups of 128 rows", "(1 - block) * kTileRows", "block * kTileRows"),
    "a block ends before the other": ("groups of 128 rows", "if (first_row >= starts", "if (tile.row >= starts"),
    "steps for nothing": ("no rows in any group", "if (first_row >= starts", "if (first_row > starts"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: (FILE, *mistake) for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    case, right, wrong = MISTAKES[mistake]
    check(case)
    with pytest.raises((AssertionError, EmulationError)):
        check(case, ((FILE, right, wrong),))
