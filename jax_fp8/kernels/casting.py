"""The cast at the end of every kernel that writes FP8: its attributes, its reference, and its results as a pair.

    values = saturate(f32(x) * (1 / scale)), rounded once to nearest even

Overflow and ±inf saturate to ±fp8_max; NaN becomes the byte 0x7F. The cast runs in the same pass as its producer (a
plain matrix, a norm, an activation). Its results are a `Fp8Pair` in the wanted orientations, as a list of arrays:

    the matrices, the amax f32[], and one scale f32[], or by tile one array of scales for each matrix

Kernels know one scale a tensor, and the tiles that cuBLASLt multiplies on Hopper: LINE and SQUARE, in E4M3. They write
the scales of lines as the GEMM reads them, with neighbouring rows contiguous; a pair has the transpose of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.cast import LINE, SQUARE, Cast, CastRule, Tile
from jax_fp8.core.formats import E4M3, fp8_max
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, spread, tiles_of
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.dispatch import Split, gathered, pmax

NAN_BYTE = np.uint8(0x7F)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)  # an amax or a scale, as a kernel returns it
NOTHING = (0, 0)  # the shape of an operand or a result that is left out
KNOWN_TILES = ((LINE, LINE), (LINE, SQUARE), (SQUARE, SQUARE))  # rowwise and columnwise
ORIENTATIONS = ("both", "rowwise", "columnwise")


def check_cast(cast: Cast, x_dtype: jax.typing.DTypeLike) -> Cast:
    """The cast in a form that kernels know: a formula that they do not know is computed here. Raises for dtypes that
    they do not cast from.
    """
    fp8_max(cast.rule.dtype)  # says what it must be
    if x_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"quantize needs float32, bfloat16 or float16, got {x_dtype}; cast first")
    rule = cast.rule
    if rule.tile is not None or rule.formula is None or _is_known(rule.formula):
        return cast
    return Cast.with_scale(rule.dtype, rule.scale(cast.source))


def source_dims(cast: Cast) -> str:
    """The source's part of a dispatch rule. Its dim is gathered: kernels pick a row by its number in the whole."""
    return "r" if cast.source.ndim else ""


def has_kernel(*rules: CastRule) -> bool:
    """Whether kernels can follow these rules: any with one scale a tensor, and by tile those of block scaling."""
    return all(
        rule.tile is None
        or ((rule.tile, rule.columnwise_tile) in KNOWN_TILES and rule.dtype == E4M3 and _is_known(rule.formula))
        for rule in rules
    )


def attributes(rule: CastRule) -> dict[str, object]:
    """The attributes of a custom call for a rule."""
    how = formula_attributes(rule.formula)
    if rule.tile is None:
        return {"row": np.int32(rule.row), "from_amax": rule.formula is not None, **how}
    return {"square": rule.tile == SQUARE, "square_t": rule.columnwise_tile == SQUARE, **how}


def formula_attributes(formula: object) -> dict[str, object]:
    """The attributes of a custom call for a `ScaleFormula`; for anything else defaults, which no kernel reads."""
    known = formula if isinstance(formula, ScaleFormula) else ScaleFormula()
    return {
        "margin": np.int32(known.margin),
        "amax_epsilon": np.float32(known.amax_epsilon),
        "power_2_scale": known.power_2_scale,
    }


def _is_known(formula: object) -> bool:
    return type(formula) is ScaleFormula


def quantize_reference(
    x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array, tile: Tile | None = None
) -> jax.Array:
    """The FP8 values of `x`, of any shape; `scale` f32[], or one for each tile."""
    scaled = x.astype(jnp.float32) * (np.float32(1) / spread(scale, x.shape, tile))
    largest = fp8_max(dtype)
    rounded = jnp.clip(scaled, -largest, largest).astype(dtype)
    return with_one_nan(rounded, jnp.isnan(scaled))


def cast_reference(x: jax.Array, cast: Cast) -> Fp8Array:
    """A matrix (m, n) as a cast makes it rowwise, by operations that fuse with others."""
    rule = cast.rule
    element = tile_amaxes(x, rule.tile) if rule.tile else cast.source[rule.row] if cast.source.ndim else cast.source
    scale = rule.scale(element)
    return Fp8Array(quantize_reference(x, rule.dtype, scale, rule.tile), scale, rule.tile)


def with_one_nan(values: jax.Array, is_nan: jax.Array) -> jax.Array:
    """FP8 values with the one NaN of a cast wherever there is one.

    It is chosen among bytes: a NaN computed beside every tensor is a false alarm to `jax_debug_nans`.
    """
    chosen = jnp.where(is_nan, NAN_BYTE, lax.bitcast_convert_type(values, jnp.uint8))
    return lax.bitcast_convert_type(chosen, values.dtype)


def tile_amaxes(x: jax.Array, tile: Tile) -> jax.Array:
    """The amax of each tile of a matrix (m, n): f32[ceil(m / tile[0]), ceil(n / tile[1])]; at its end tiles are cut.

    A NaN is left out, unlike in the amax of a tensor, which has to tell of it.
    """
    (down, across), (rows, columns) = tiles_of(x.shape, tile), tile
    numbers = jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)
    whole = jnp.pad(numbers, [(0, down * rows - x.shape[0]), (0, across * columns - x.shape[1])])
    tiles = whole.reshape(down, rows, across, columns).swapaxes(1, 2)
    return jax.vmap(jax.vmap(amax_reference))(tiles)


def check_whole_tiles(split: Split, dims: Sequence[str], shape: Sequence[int], tile: tuple[int, ...]) -> None:
    """Raise where a mesh splits a matrix within a tile: then a shard would have other tiles.

    Args:
      dims, shape: of this shard.
    """
    for dim, size, length in zip(dims, shape, tile, strict=True):
        if split.get(dim) and size % length:
            raise ValueError(
                f"each device must hold whole tiles of {tile[0]} x {tile[1]} of a matrix with scales by tile, "
                f"got {tuple(shape)} on each of those that {split[dim]} splits it over; "
                "use other sizes, another mesh, or a recipe with one scale a tensor"
            )


def tile_dims(dims: str, tile: tuple[int, ...]) -> str:
    """The dims of the scales of a matrix with these dims, "m n": "m n/128" of lines."""
    return " ".join(dim if length == 1 else f"{dim}/{length}" for dim, length in zip(dims.split(), tile, strict=True))


@dataclass(frozen=True)
class PairResults:
    """How a pair comes out of a kernel or its reference: a list of arrays, by a rule,
    in "both" orientations or one of them.
    """

    rule: CastRule
    orientations: str = "both"

    def __post_init__(self):
        if self.orientations not in ORIENTATIONS:
            raise ValueError(f"orientations must be one of {ORIENTATIONS}, got {self.orientations!r}")

    def wanted(self, rowwise: PyTree, columnwise: PyTree) -> tuple:
        """The items of the orientations that are wanted."""
        both = rowwise, columnwise
        return {"both": both, "rowwise": both[:1], "columnwise": both[1:]}[self.orientations]

    def dims(self, rowwise: str, columnwise: str, matrix: str = "m n") -> str:
        """The results' part of a dispatch rule, from the dims of the results; `matrix` are those that tiles divide."""
        scales: Sequence[str] = ("",)
        if self.rule.tile is not None:
            m, n = matrix.split()
            both = self.wanted(matrix, f"{n} {m}")
            scales = [tile_dims(*of) for of in zip(both, self.tiles, strict=True)]
        return ", ".join([*self.wanted(rowwise, columnwise), "", *scales])

    @property
    def tiles(self) -> tuple:
        """Those of the orientations that are wanted."""
        return self.wanted(self.rule.tile, self.rule.columnwise_tile)

    def operands(self, x: jax.Array, source: jax.Array) -> tuple[jax.Array, ...]:
        """What a kernel begins with: by tile the source says nothing, and is left out."""
        return (x, source) if self.rule.tile is None else (x,)

    def shapes(self, shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """What a kernel returns for a matrix (m, n): both orientations, NOTHING for one that is not wanted;
        amax and scale, or by tile the scales of both orientations.
        """
        rule = self.rule
        rowwise = NOTHING if self.orientations == "columnwise" else shape
        columnwise = NOTHING if self.orientations == "rowwise" else shape[::-1]
        matrices = [jax.ShapeDtypeStruct(dims, rule.dtype) for dims in (rowwise, columnwise)]
        if rule.tile is None:
            return [*matrices, SCALAR, SCALAR]
        scales = _kernel_scales(rowwise, rule.tile), _kernel_scales(columnwise, rule.columnwise_tile)
        return [*matrices, SCALAR, *scales]

    def from_kernel(self, arrays: Sequence[PyTree], split: Split, *dims: str) -> tuple[jax.Array, ...]:
        """The list, from what a kernel returned for a shard; `dims` are those of the matrix."""
        values, values_t, amax, *scales = arrays
        if self.rule.tile is not None:
            self._check_tiles(split, dims, values.shape if self.orientations != "columnwise" else values_t.shape[::-1])
            scales = [logical_scales(*of) for of in zip(self.wanted(*scales), self.tiles, strict=True)]
        return *self.wanted(values, values_t), pmax(amax, split, *dims), *scales

    def from_reference(self, y: jax.Array, source: jax.Array, split: Split, *dims: str) -> tuple[jax.Array, ...]:
        """The list, for a matrix as it is cast, or a shard of one."""
        rule, amax = self.rule, pmax(amax_reference(y), split, *dims)
        if rule.tile is None:
            element = gathered(source, split, "r")[rule.row] if source.ndim else source
            scale = rule.scale(element)
            values = quantize_reference(y, rule.dtype, scale)
            return *self.wanted(values, values.T), amax, scale
        self._check_tiles(split, dims, y.shape)
        cast = [
            cast_reference(matrix, Cast(source, replace(rule, tile=tile)))
            for matrix, tile in zip(self.wanted(y, y.T), self.tiles, strict=True)
        ]
        return *(array.values for array in cast), amax, *(array.scale for array in cast)

    def _check_tiles(self, split: Split, dims: Sequence[str], shape: tuple[int, ...]):
        both = self.wanted((dims, shape), (dims[::-1], shape[::-1]))
        for (names, sizes), tile in zip(both, self.tiles, strict=True):
            check_whole_tiles(split, names, sizes, tile)

    def pair(self, arrays: Sequence[jax.Array]) -> Fp8Pair:
        """The pair of such a list."""
        tiles, by_tile = self.tiles, self.rule.tile is not None
        count = len(tiles)
        matrices, amax, scales = arrays[:count], arrays[count], arrays[count + 1 :]
        found = [Fp8Array(*of) for of in zip(matrices, scales if by_tile else [*scales] * count, tiles, strict=True)]
        rowwise = None if self.orientations == "columnwise" else found[0]
        columnwise = None if self.orientations == "rowwise" else found[-1]
        return Fp8Pair(rowwise, columnwise, amax, shares_scale=count == 2 and not by_tile)


def _kernel_scales(shape: tuple[int, ...], tile: Tile | None) -> jax.ShapeDtypeStruct:
    """The scales of a matrix as kernels have them: of lines, its rows are the last dim."""
    assert tile is not None, "scales by tile"
    tiles = tiles_of(shape, tile)
    return jax.ShapeDtypeStruct(tiles[::-1] if tile == LINE else tiles, jnp.float32)


def logical_scales(scales: jax.Array, tile: Tile) -> jax.Array:
    """Scales as a pair has them, from those of a kernel."""
    return scales.T if tile == LINE else scales
