"""Valid calls, several for each target, from which the mutations make invalid ones."""

import itertools
from collections.abc import Iterator

import numpy as np

from handlers.arrays import ONE, SCALAR, SOURCES, floats, tiles
from handlers.calls import BF16, E4M3, E5M2, F16, F32, S32, U16, U32, Buffer, Call
from handlers.chain_contracts import chain
from handlers.generation_contracts import cached_attention
from handlers.product_contracts import few_rows, gemm, grouped, weight_gradient

SHAPES = ((16, 32), (5, 3), (128, 272), (0, 32), (16, 0))
FP8 = (E4M3, E5M2)

SCALE_RULE = {"row": np.int32(0), "from_amax": True, "margin": np.int32(0), "amax_epsilon": np.float32(0)}
SCALE_RULE |= {"power_2_scale": False}
TILE_RULE = {"square": False, "square_t": False, "margin": np.int32(1), "amax_epsilon": np.float32(1e-4)}
TILE_RULE |= {"power_2_scale": True}


def contracts() -> dict[str, list[Call]]:
    """The valid calls by target."""
    found: dict[str, list[Call]] = {}
    makers = (
        quantize,
        quantize_by_tile,
        uninitialized,
        transpose,
        take_rows,
        activation,
        activation_by_tile,
        amax,
        norm,
        norm_by_tile,
    )
    makers += (norm_backward, cached_attention, chain, cross_entropy, update_state, adam, few_rows, grouped, gemm)
    makers += (weight_gradient,)
    for maker in makers:
        for call in maker():
            found.setdefault(f"jax_fp8_{call.target}", []).append(
                Call(f"jax_fp8_{call.target}", call.operands, call.results, call.attributes)
            )
    return found


def sums_of(rows: int, cols: int) -> tuple[Buffer, ...]:
    return floats(cols), floats(tiles(rows), cols)


def quantize() -> Iterator[Call]:
    for (m, n), dtype, fp8 in zip(SHAPES, itertools.cycle(SOURCES), itertools.cycle(FP8), strict=False):
        x, source = Buffer(dtype, (m, n), 1), Buffer(F32, (3,), 2)
        values, values_t = Buffer(fp8, (m, n)), Buffer(fp8, (n, m))
        rule = SCALE_RULE | {"row": np.int32(2)}
        yield Call("quantize", (x, source), (values, SCALAR, SCALAR), rule)
        yield Call("quantize_transpose", (x, source), (values, values_t, SCALAR, SCALAR), rule)
        results = (values, values_t, SCALAR, SCALAR, *sums_of(m, n))
        yield Call("quantize_transpose_sums", (x, source), results, rule)
    parts = [Buffer(BF16, (16, n), n) for n in (16, 48, 32)]
    results = (Buffer(E4M3, (16, 96)), Buffer(E4M3, (96, 16)), SCALAR, SCALAR)
    yield Call("quantize_transpose", (parts[0], ONE, *parts[1:]), results, SCALE_RULE)
    yield Call("quantize_transpose_sums", (parts[0], ONE, *parts[1:]), (*results, *sums_of(16, 96)), SCALE_RULE)


def tile_results(m: int, n: int, square: bool, square_t: bool, wanted: str = "both") -> tuple[Buffer, ...]:
    scales = (tiles(m), tiles(n)) if square else (tiles(n), m)
    scales_t = (tiles(n), tiles(m)) if square_t else (tiles(m), n)
    has, has_t = wanted != "columnwise", wanted != "rowwise"
    values, values_t = Buffer(E4M3, (m, n) if has else (0, 0)), Buffer(E4M3, (n, m) if has_t else (0, 0))
    scales, scales_t = scales if has else (0, 0), scales_t if has_t else (0, 0)
    return values, values_t, SCALAR, floats(*scales), floats(*scales_t)


def squares() -> Iterator[tuple[bool, bool, dict]]:
    for square, square_t in ((False, False), (True, True), (False, True)):
        yield square, square_t, TILE_RULE | {"square": square, "square_t": square_t}


def quantize_by_tile() -> Iterator[Call]:
    for (m, n), dtype, (square, square_t, rule), wanted in zip(
        SHAPES,
        itertools.cycle(SOURCES),
        itertools.cycle(squares()),
        itertools.cycle(("both", "rowwise", "columnwise")),
        strict=False,
    ):
        x, results = Buffer(dtype, (m, n), 3), tile_results(m, n, square, square_t, wanted)
        yield Call("quantize_by_tile", (x,), results, rule)
        yield Call("quantize_by_tile_sums", (x,), (*results, *sums_of(m, n)), rule)
    parts = tuple(Buffer(BF16, (16, n), n) for n in (16, 48, 32))
    yield Call("quantize_by_tile", parts, tile_results(16, 96, False, False), TILE_RULE)


def uninitialized() -> Iterator[Call]:
    yield Call("uninitialized", (), ())
    yield Call("uninitialized", (), (floats(3, 5), Buffer(E4M3, (0, 2))))


def transpose() -> Iterator[Call]:
    for m, n in SHAPES:
        yield Call("transpose", (Buffer(E5M2, (m, n), 4),), (Buffer(E5M2, (n, m)),))


def take_rows() -> Iterator[Call]:
    of_x, sources = 5, np.array([4, -1, 0, 5, 2, 2**31 - 1, 3, 3] * 4, np.int32)
    for rows, cols, both in ((32, 48, True), (16, 16, True), (19, 32, False), (0, 16, False)):
        x, of_rows = Buffer(E5M2, (of_x, cols), 4), Buffer(S32, (rows,), sources[:rows], trusted=True)
        transpose = (cols, rows) if both else (0, 0)
        yield Call("take_rows", (x, of_rows), (Buffer(E5M2, (rows, cols)), Buffer(E5M2, transpose)))


ACTIVATIONS = ("gelu", "gelu_exact", "silu", "relu", "squared_relu", "swiglu", "geglu", "reglu")
GATED = ACTIVATIONS[-3:]


def activation_inputs(number: int, m: int, n: int) -> tuple[str, Buffer, Buffer, int]:
    """The activation's name, x, dy and the columns of x; the result has `n` columns."""
    name, dtype = ACTIVATIONS[number % len(ACTIVATIONS)], SOURCES[number % 3]
    cols = 2 * n if name in GATED else n
    return name, Buffer(dtype, (m, cols), 5), Buffer(dtype, (m, n), 6), cols


def activation() -> Iterator[Call]:
    for number, (m, n) in enumerate((*SHAPES, *SHAPES)):
        name, x, dy, cols = activation_inputs(number, m, n)
        wanted = (n, m) if number % 2 else (0, 0)
        results = (Buffer(E4M3, (m, n)), Buffer(E4M3, wanted), SCALAR, SCALAR)
        rule = {"activation": name} | SCALE_RULE
        weights = (floats(m),) if number % 3 == 0 else ()
        yield Call("activation_quantize", (x, ONE, *weights), results, rule)
        results = (Buffer(E5M2, (m, cols)), Buffer(E5M2, (cols, m)), Buffer(E4M3, (n, m)), SCALAR, SCALAR)
        yield Call("activation_backward_quantize", (dy, x, ONE, ONE, *weights), (*results, *sums_of(m, cols)), rule)
        yield Call("activation_amax", (x, *weights), (SCALAR,), {"activation": name})
        yield Call("activation_backward_amax", (dy, x, *weights), (SCALAR,), {"activation": name})


def activation_by_tile() -> Iterator[Call]:
    for number, ((m, n), (square, square_t, rule)) in enumerate(zip(SHAPES, itertools.cycle(squares()), strict=False)):
        name, x, dy, cols = activation_inputs(number + 3, m, n)
        rule = rule | {"activation": name}
        weights = (floats(m),) if number % 2 else ()
        yield Call("activation_quantize_by_tile", (x, *weights), tile_results(m, n, square, square_t), rule)
        beside = (Buffer(E4M3, (n, m)), floats(tiles(m), n))
        results = (*tile_results(m, cols, square, square_t), *beside, *sums_of(m, cols))
        yield Call("activation_backward_quantize_by_tile", (dy, x, *weights), results, rule)


def amax() -> Iterator[Call]:
    for shape in ((), (7,), (3, 5, 2), (0, 4)):
        yield Call("amax", (Buffer(F32, shape, 7),), (SCALAR,))
    yield Call("amax", tuple(Buffer(dtype, (9, 16), 8) for dtype in SOURCES), (SCALAR,))


def norm() -> Iterator[Call]:
    for number, (m, n) in enumerate(((16, 32), (5, 3), (128, 272), (0, 32), (32, 4096))):
        x, layernorm = Buffer(SOURCES[number % 3], (m, n), 9), number % 2 == 0
        parameters = (floats(n), floats(n if layernorm else 0))
        epsilon = {"epsilon": np.float32(1e-5)}
        mean = floats(m, 1) if layernorm else floats(0, 0)
        results = (Buffer(E4M3, (m, n)), Buffer(E4M3, (n, m)), SCALAR, SCALAR, mean, floats(m, 1))
        yield Call("norm_quantize", (x, ONE, *parameters), results, epsilon | SCALE_RULE)
        yield Call("norm_amax", (x, *parameters), (SCALAR,), epsilon)


def norm_by_tile() -> Iterator[Call]:
    for number, ((m, n), (square, square_t, rule)) in enumerate(
        zip(((16, 32), (5, 3), (128, 272), (0, 32)), itertools.cycle(squares()), strict=False)
    ):
        x, layernorm = Buffer(SOURCES[number % 3], (m, n), 10), number % 2 == 0
        parameters = (floats(n), floats(n if layernorm else 0))
        statistics = (floats(m, 1) if layernorm else floats(0, 0), floats(m, 1))
        results = (*tile_results(m, n, square, square_t), *statistics)
        yield Call("norm_quantize_by_tile", (x, *parameters), results, {"epsilon": np.float32(1e-5)} | rule)


def norm_backward() -> Iterator[Call]:
    for number, (m, n) in enumerate(((16, 32), (5, 3), (128, 272), (0, 32))):
        x, layernorm, partials = Buffer(SOURCES[number % 3], (m, n), 11), number % 2 == 0, 3
        residual = Buffer(x.dtype, (m, n) if number > 1 else (0, 0), 12)
        mean = floats(m, 1) if layernorm else floats(0, 0)
        dbias = (floats(n), floats(partials, n)) if layernorm else (floats(0), floats(0, 0))
        results = (Buffer(x.dtype, (m, n)), floats(n), dbias[0], floats(partials, n), dbias[1])
        yield Call("norm_backward", (x, x, residual, floats(n), mean, floats(m, 1)), results)


def cross_entropy() -> Iterator[Call]:
    for number, (rows, vocab) in enumerate(((4, 64), (3, 17), (0, 8), (1, 1))):
        logits = Buffer(SOURCES[number % 3], (rows, vocab), 13)
        labels = Buffer(S32, (rows,), np.array([0, -100, vocab, vocab - 1], np.int32)[:rows])
        results = (Buffer(logits.dtype, logits.shape), floats(rows), floats(rows))
        yield Call("cross_entropy", (logits, labels, floats(rows)), results, {"z_loss": np.float32(1e-4)})


def update_state() -> Iterator[Call]:
    for shapes, length in (([(3,)], 16), ([(3,), (4, 3), (0, 3)], 1), ([], 4)):
        leaves = [buffer for shape in shapes for buffer in (Buffer(F32, shape, 14), Buffer(F32, (*shape, length), 15))]
        rows = sum(int(np.prod(shape)) for shape in shapes)
        results = [Buffer(leaf.dtype, leaf.shape, alias=1 + number) for number, leaf in enumerate(leaves)]
        how = {"forward": "float8_e4m3fn", "backward": "float8_e5m2", "margin": np.int32(0)}
        how |= {"most_recent": bool(shapes), "forget_outliers": not shapes}
        counts = Buffer(S32, (2,))
        yield Call("update_state", (Buffer(F32, (rows,), 16), *leaves), (counts, *results), how)


PARAM, MASTER, VALUES, VALUES_T, MU_SCALE, NU_SCALE, DECAYS = (1 << bit for bit in range(7))


def places(leaves: int) -> Buffer:
    """The places of whole leaves: zeros. Other places have words for a division, which no user passes."""
    return Buffer(U32, (leaves, 10), np.zeros((leaves, 10), np.uint32), trusted=True)


class AdamCall:
    """The arrays of one step, one after the other."""

    def __init__(self):
        self.operands = [Buffer(F32, (11,), np.full(11, 0.5, np.float32)), floats(0, 5), Buffer(U32, ())]
        self.operands.append(places(0))
        self.results: list[Buffer] = []
        self.layout: list[int] = []
        self.place: list[tuple[int, int]] = []
        self.casts = 0
        self.by_tile = False

    def updated(self, dtype: int, shape: tuple[int, ...]) -> None:
        self.results.append(Buffer(dtype, shape, alias=len(self.operands)))
        self.operands.append(Buffer(dtype, shape))

    def cast(self, rows: int, cols: int) -> "AdamCall":
        self.casts += 1
        self.updated(E4M3, (rows, cols))
        self.updated(E4M3, (cols, rows))
        self.updated(F32, (tiles(rows), tiles(cols)) if self.by_tile else ())
        self.updated(F32, ())
        if self.by_tile:
            self.updated(F32, (tiles(cols), tiles(rows)))
        return self

    def leaf(self, shape, layout, *, g=F32, mu=F32, nu=F32, param=F32, master=F32, place=(-1, 0)) -> "AdamCall":
        self.layout.append(layout)
        self.place.append(place)
        self.operands.append(Buffer(g, shape))
        self.updated(mu, shape)
        self.updated(nu, shape)
        if layout & PARAM:
            self.updated(param, shape)
        if layout & MASTER:
            self.updated(master, shape)
        if layout & VALUES:
            self.updated(E4M3, shape)
        if layout & VALUES_T:
            self.updated(E4M3, shape[::-1])
        for _ in range(2 * bool(layout & VALUES) + bool(layout & MU_SCALE) + bool(layout & NU_SCALE)):
            self.updated(F32, ())
        return self

    def call(self) -> Call:
        self.operands[1], self.operands[3] = floats(len(self.layout), 5), places(len(self.layout))
        how = {"layout": np.array(self.layout, np.int32), "shared_casts": np.int32(self.casts)}
        how |= {"shared_cast": np.array([cast for cast, _ in self.place], np.int32)}
        how |= {"first_column": np.array([first for _, first in self.place], np.int32)}
        how |= {"first_leaf": np.int32(0), "adam_w_mode": True, "by_tile": self.by_tile}
        how |= {"margin": np.int32(0), "amax_epsilon": np.float32(0), "power_2_scale": False}
        return Call("adam", tuple(self.operands), tuple(self.results), how)


def adam() -> Iterator[Call]:
    yield AdamCall().leaf((5, 3), PARAM | DECAYS).call()
    yield AdamCall().call()
    mixed = AdamCall().leaf((7,), PARAM).leaf((0, 4), PARAM).leaf((), PARAM)
    mixed.leaf((16, 32), PARAM | MASTER | VALUES | VALUES_T, g=BF16, mu=BF16, param=BF16)
    mixed.leaf((16, 32), MASTER | VALUES, g=F16, mu=BF16, nu=BF16)
    mixed.leaf((33,), PARAM | MASTER | MU_SCALE | NU_SCALE, mu=E4M3, nu=E4M3, param=BF16, master=U16)
    yield mixed.call()
    shared = AdamCall().cast(16, 48).leaf((16, 16), PARAM, place=(0, 0)).leaf((16, 32), PARAM, place=(0, 16))
    yield shared.leaf((3,), PARAM).call()
    by_tile = AdamCall()
    by_tile.by_tile = True
    by_tile.cast(32, 160).cast(16, 16)
    by_tile.leaf((32, 128), PARAM, place=(0, 0)).leaf((32, 32), PARAM, place=(0, 128))
    yield by_tile.leaf((16, 16), PARAM | MASTER, param=BF16, place=(1, 0)).call()
