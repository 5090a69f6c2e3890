"""The expected cast by tiles, bit for bit in NumPy, for the tests of all kernels that cast by tiles."""

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import reference
from emulation import Result
from reference import assert_same_bits

E4M3 = ml_dtypes.float8_e4m3fn
TILE = 128


@dataclass(frozen=True)
class TileRule:
    """The rule of csrc/by_tile.h, and the orientations that a call returns."""

    square: bool = False
    square_t: bool = False
    margin: int = 0
    amax_epsilon: float = 0.0
    power_2_scale: bool = False
    rowwise: bool = True
    columnwise: bool = True

    def attributes(self) -> tuple:
        return self.square, self.square_t, self.margin, self.amax_epsilon, self.power_2_scale

    def scale_of(self, amax, dtype) -> np.float32:
        return reference.current_scale(amax, dtype, self.amax_epsilon, self.power_2_scale, self.margin)

    def results(self, rows: int, cols: int, offset: int = 0) -> list:
        """Values, values_t, amax, scales, scales_t; None for an orientation that the call leaves out."""
        straight, transposed = ((rows, cols), self.square), ((cols, rows), self.square_t)
        sides = [side if wanted else None for side, wanted in ((straight, self.rowwise), (transposed, self.columnwise))]
        values = [side and Result(side[0], E4M3, offset) for side in sides]
        scales = [side and Result(scales_shape(*side), np.float32) for side in sides]
        return [*values, Result((), np.float32), *scales]

    def filled(self, got: Iterator[np.ndarray]) -> list:
        """The arrays that a call returned for `results`, with None again where there were none."""
        is_wanted = (self.rowwise, self.columnwise, True, self.rowwise, self.columnwise)
        return [next(got) if wanted else None for wanted in is_wanted]

    def check(self, x: np.ndarray, got: list) -> None:
        values, values_t, amax, scales, scales_t = got
        assert_same_bits(amax, reference.amax(x))
        for matrix, is_square, results in (
            (x, self.square, (values, scales)),
            (x.T, self.square_t, (values_t, scales_t)),
        ):
            if results[0] is not None:
                for array, wanted in zip(results, self.cast(matrix, is_square), strict=True):
                    assert_same_bits(array, wanted)

    def cast(self, matrix: np.ndarray, square: bool) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of a matrix whose rows lie along the contracted dim."""
        tile = (TILE, TILE) if square else (1, TILE)
        values, scales = reference.quantize_by_tile(matrix, E4M3, tile, self.scale_of)
        return values, scales if square else scales.T


def scales_shape(shape: tuple[int, int], square: bool) -> tuple[int, int]:
    tiles = [-(-length // TILE) for length in shape]
    return (tiles[0], tiles[1]) if square else (tiles[1], shape[0])
