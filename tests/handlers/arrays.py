"""Operands and results that many contracts have, and the lengths of arrays of scales."""

import numpy as np

from handlers.calls import BF16, F16, F32, U8, Buffer

WORKSPACE = Buffer(U8, (32 << 20,), -1)
SCALAR = Buffer(F32, ())
ONE = Buffer(F32, (), np.array(1, np.float32))
SOURCES = (F32, BF16, F16)


def tiles(length: int) -> int:
    return -(-length // 128)


def filled_up(length: int) -> int:
    return -(-length // 4) * 4


def floats(*shape: int) -> Buffer:
    return Buffer(F32, shape)
