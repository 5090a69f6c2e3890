"""Valid calls of the products of matrices, several for each target."""

import itertools
from collections.abc import Iterator

import numpy as np

from handlers.arrays import ONE, SOURCES, WORKSPACE, filled_up, floats, tiles
from handlers.calls import BF16, E4M3, E5M2, F16, F32, S32, Buffer, Call


def few_rows() -> Iterator[Call]:
    k = 272
    pairs = (("", E4M3), ("1d2d", E4M3), ("", BF16), ("2d", BF16))
    variants = itertools.product(pairs, ((5, 48, 48, 0), (17, 256, 32, 128), (3, 0, 0, 0), (0, 16, 16, 0)))
    for number, ((scaling, dtype), (m, every, n, first)) in enumerate(variants):
        d, has_addends = SOURCES[number % 3], number % 2 == 0
        a_scale = floats(tiles(k), filled_up(m)) if scaling == "1d2d" else ONE
        b_scale = floats(tiles(every), filled_up(tiles(k))) if scaling else ONE
        operands = (Buffer(dtype, (m, k), 27), Buffer(E4M3, (every, k), 28), a_scale, b_scale)
        addends = (Buffer(BF16 if d == F32 else d, (every,)), Buffer(d, (m, n))) if has_addends else ()
        how = {"has_bias": has_addends, "has_c": has_addends, "alpha": np.float32(1), "config": np.int32(0)}
        how |= {"first_column": np.int64(first), "scaling": scaling} | AS_IT_IS
        yield Call("few_rows_gemm", (*operands, *addends), (Buffer(d, (m, n)),), how)
    yield from prepared()


AS_IT_IS = {"norm": "", "epsilon": np.float32(0), "casts": False, "a_row": np.int32(0), "activation": ""}
AS_IT_IS |= {"second_part": np.int64(0), "third_part": np.int64(0), "casts_d": False, "d_row": np.int32(0)}


def prepared() -> Iterator[Call]:
    n, k = 64, 272
    variants = itertools.product(("", "layernorm", "rmsnorm"), (True, False), ("", "gelu", "swiglu"))
    for number, (norm, casts, activation) in enumerate(variants):
        if not (norm or casts or activation):
            continue
        gated, casts_d, m = activation == "swiglu", number % 4 == 0, 20 if casts and number % 3 else 5
        d = E4M3 if casts_d else SOURCES[number % 3]
        operands = (Buffer(BF16, (m, k), 29), Buffer(E4M3, (n, k), 30), floats(3) if casts else ONE, ONE)
        norms = {"": (), "layernorm": (floats(k), floats(k)), "rmsnorm": (floats(k),)}[norm]
        how = {"has_bias": False, "has_c": False, "alpha": np.float32(1), "config": np.int32(0)}
        how |= {"first_column": np.int64(0), "scaling": "", "norm": norm, "epsilon": np.float32(1e-6)}
        how |= {"casts": casts, "a_row": np.int32(2 if casts else 0), "activation": activation}
        how |= {"second_part": np.int64(number % 2 * 16), "third_part": np.int64(0)}
        how |= {"casts_d": casts_d, "d_row": np.int32(1 if casts_d else 0)}
        results = (Buffer(d, (m, n // 2 if gated else n)), *((Buffer(E4M3, (m, k)),) if casts else ()))
        yield Call("few_rows_gemm", (*operands, *norms, *((floats(2),) if casts_d else ())), results, how)


def starts_of(*ends: int) -> Buffer:
    return Buffer(S32, (1 + len(ends),), np.array([0, *ends], np.int32), trusted=True)


def grouped() -> Iterator[Call]:
    for scaling, d in itertools.product(("", "1d2d"), SOURCES):
        rows, k, n, groups = 256, 144, 48, 2
        a, b = Buffer(E4M3, (rows, k), 17), Buffer(E4M3 if scaling else E5M2, (groups, n, k), 18)
        a_scale = floats(tiles(k), filled_up(rows)) if scaling else ONE
        b_scale = floats(groups, tiles(n), filled_up(tiles(k))) if scaling else ONE
        operands = (a, b, a_scale, b_scale, starts_of(128, 256))
        how = {"scaling": scaling, "side_by_side": d == F16}
        yield Call("grouped_gemm", operands, (Buffer(d, (rows, n)),), how)
        m, rows = 32, 256
        a, b = Buffer(E4M3 if scaling else E5M2, (m, rows), 19), Buffer(E4M3, (n, rows), 20)
        a_scale = floats(tiles(rows), filled_up(m)) if scaling else ONE
        b_scale = floats(tiles(n), filled_up(tiles(rows))) if scaling else ONE
        operands = (a, b, a_scale, b_scale, starts_of(128, 256))
        c = (Buffer(d, (groups, m, n), 31),) if d != BF16 else ()
        how = {"scaling": scaling, "alpha": np.float32(0.5 if c else 1)}
        yield Call("grouped_gemm_weight_gradient", (*operands, *c), (Buffer(d, (groups, m, n)),), how)


def gemm() -> Iterator[Call]:
    m, k = 5, 272
    variants = itertools.product(("", "1d2d", "2d1d", "1d1d"), ((48, 48, 0), (256, 32, 128), (0, 0, 0)), (False, True))
    for number, (scaling, (every, n, first), has_addends) in enumerate(variants):
        d = SOURCES[number % 3]
        a, b = Buffer(E4M3, (m, k), 21), Buffer(E5M2 if number % 2 else E4M3, (every, k), 22)
        a_scale = b_scale = ONE
        if scaling:
            lines, squares = floats(tiles(k), filled_up(m)), floats(tiles(m), filled_up(tiles(k)))
            a_scale = lines if scaling.startswith("1d") else squares
            lines, squares = floats(tiles(k), filled_up(n)), floats(tiles(every), filled_up(tiles(k)))
            b_scale = lines if scaling.endswith("1d") else squares
        addends = (Buffer(BF16 if d == F32 else d, (every,)), Buffer(d, (m, n))) if has_addends else ()
        how = {"has_bias": has_addends, "has_c": has_addends, "fast_accumulation": not scaling}
        how |= {"alpha": np.float32(1), "first_column": np.int64(first), "candidate": np.int32(number % 3)}
        results = (Buffer(d, (m, n)), WORKSPACE)
        yield Call("gemm", (a, b, a_scale, b_scale, *addends), results, how | {"scaling": scaling})


def weight_gradient() -> Iterator[Call]:
    for k, m, n, total in ((3, 16, 24, True), (1, 8, 8, False), (5, 0, 8, False), (5, 8, 0, True)):
        dtype = BF16 if total else F16
        d = floats(m, n)
        addends = (d,) if total else ()
        yield Call("weight_gradient", (Buffer(dtype, (k, m), 23), Buffer(dtype, (k, n), 24), *addends), (d, WORKSPACE))
