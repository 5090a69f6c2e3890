"""Which kernels are gathered in FP8 by their tiles, and who is refused sequence parallelism."""

from dataclasses import dataclass
from typing import Any

import pytest

import jax_fp8 as fp8
from jax_fp8.core.cast import LINE, SQUARE, Cast
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.parallel.tiles import check_sequence, has_whole_squares

ONE_SCALE = [fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling()]


@dataclass(frozen=True)
class ByTile:
    tiles: tuple
    fp8_format: Any = None
    split_accumulator: tuple[str, ...] = ()
    has_state: bool = False

    def cast(self, tensor, scales, measure):
        return Cast.by_tile(fp8.E4M3, self.tiles[0], ScaleFormula(), self.tiles[1])


@pytest.mark.parametrize(("rows", "is_whole"), [(128, True), (384, True), (64, False), (192, False)])
def test_rows_hold_whole_squares_or_cut_them(rows, is_whole):
    assert has_whole_squares(fp8.BlockScaling(), rows) == is_whole
    assert all(has_whole_squares(recipe, rows) for recipe in ONE_SCALE)


@pytest.mark.parametrize("tiles", [(LINE, LINE), (LINE, SQUARE), (SQUARE, LINE), ((64, 128), (128, 64))], ids=str)
def test_other_tiles_are_no_squares(tiles):
    """The scales of a transpose are those of the matrix only where both have the same squares."""
    assert not has_whole_squares(ByTile(tiles), 128)


@pytest.mark.parametrize("recipe", [fp8.BlockScaling(), fp8.BlockScaling(wgrad="1d1d"), ByTile((SQUARE, SQUARE))])
def test_sequence_parallelism_needs_one_scale_a_tensor(recipe):
    check_sequence([None, *ONE_SCALE])
    with pytest.raises(ValueError, match=r"needs recipes with one scale a tensor, got .*, with scales by tile; leave"):
        check_sequence([*ONE_SCALE, recipe])
