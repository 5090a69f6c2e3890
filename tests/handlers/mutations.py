"""Makes invalid calls from valid ones, with one or two changes."""

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping

import numpy as np

from handlers.calls import (
    BF16,
    BYTES,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    MOST_BYTES,
    PRED,
    S8,
    S32,
    S64,
    U8,
    U16,
    U32,
    Buffer,
    Call,
)

DTYPES = (PRED, S8, S32, S64, U8, U16, U32, F16, F32, F64, BF16, E5M2, E4M3)
MOST_INT32, MOST_INT64 = 2**31 - 1, 2**63 - 1
# Dims that exceed all memory, or are negative.
HUGE = (MOST_INT32, 2**31, 2**32, 2**40 + 16, 2**62, MOST_INT64 - 15, MOST_INT64, -1, -16, -(2**63))
OFFSETS = (1, 2, 4, 8, 16)
INTEGERS = (-(2**63), -(2**31), -17, -1, 1, 15, 16, 17, 128, 2**24, MOST_INT32, 2**32, MOST_INT64 - 15, MOST_INT64)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 3e38)
TEXTS = ("", "1d2d", "float8_e4m3", "gelu ", "é", "x" * 300)

MOST_ELEMENTS = 2**42  # of a buffer, as csrc/sizes.h has it
# Targets with an operand of any shape.
ANY_SHAPE = ("jax_fp8_amax", "jax_fp8_chain", "jax_fp8_update_state", "jax_fp8_gemm")

# The description of a change, and the changed call.
Mutation = tuple[str, Call]


def mutations(call: Call, seed: int, pairs: int) -> Iterator[Mutation]:
    """All calls with one change, and `pairs` random calls with two."""
    single = [mutation for mutation in _of_one_thing(call) if _can_be_tried(mutation[1])]
    yield from single
    chooser = random.Random(seed)
    for _ in range(pairs):
        first, changed = chooser.choice(single)
        second, twice = chooser.choice(list(_of_one_thing(changed)))
        if _can_be_tried(twice):
            yield f"{first}, {second}", twice


def _can_be_tried(call):
    """Whether a call may run: an operand of any shape has memory for its dims, or more elements than handlers take."""
    if call.target not in ANY_SHAPE or has_memory(call):
        return True
    return any(_extent(buffer) > MOST_ELEMENTS for buffer in (*call.operands, *call.results))


def _extent(buffer):
    return math.inf if min(buffer.shape, default=0) < 0 else math.prod(dim or 1 for dim in buffer.shape)


def _of_one_thing(call):
    yield from _of_buffers(call, "operand")
    yield from _of_buffers(call, "result")
    yield from _of_counts(call)
    yield from _of_attributes(call)


def _of_buffers(call, kind):
    buffers = call.operands if kind == "operand" else call.results
    for number, buffer in enumerate(buffers):
        for what, other in _others(buffer):
            changed = [*buffers[:number], other, *buffers[number + 1 :]]
            both = (changed, call.results) if kind == "operand" else (call.operands, changed)
            # Its result lies where an operand that is updated in place does, and has the same shape: both change.
            yield f"{kind} {number} {what}", call.with_buffers(*both)
            for result, aliased in enumerate(call.results):
                if kind == "operand" and aliased.alias == number:
                    results = list(call.results)
                    results[result] = dataclasses.replace(aliased, dtype=other.dtype, shape=other.shape)
                    yield f"{kind} {number} {what}, in place", call.with_buffers(changed, results)


def _others(buffer: Buffer) -> Iterator[tuple[str, Buffer]]:
    for dtype in DTYPES:
        if dtype != buffer.dtype:
            yield f"of dtype {dtype}", dataclasses.replace(buffer, dtype=dtype)
    shapes = [(), (0,), (1,), buffer.shape[:-1], (*buffer.shape, 1), buffer.shape[::-1], (0, 0), (0, 16), (2, 3, 4, 5)]
    for place, dim in enumerate(buffer.shape):
        sizes = (*HUGE, 0, 1, dim - 1, dim + 1, dim + 16, 2 * dim)
        shapes += [(*buffer.shape[:place], size, *buffer.shape[place + 1 :]) for size in sizes]
    shapes += [tuple(dim or 2**40 for dim in buffer.shape), tuple(2**22 for _ in buffer.shape)]
    for shape in dict.fromkeys(shapes):
        if shape != buffer.shape and all(-(2**63) <= dim <= MOST_INT64 for dim in shape):
            yield f"of shape {shape}", dataclasses.replace(buffer, shape=shape)
    for offset in OFFSETS:
        if buffer.alias < 0:
            yield f"{offset} bytes off", dataclasses.replace(buffer, offset=offset)
    yield "without an address", dataclasses.replace(buffer, placed=False, alias=-1)
    if buffer.alias >= 0:
        yield "not in place", dataclasses.replace(buffer, alias=-1)
    if not buffer.trusted:
        for content in (0, 99):
            yield f"holding {content}", dataclasses.replace(buffer, content=content)


def _of_counts(call):
    some = Buffer(F32, (4,))
    for name, buffers in (("operands", call.operands), ("results", call.results)):
        others = [(f"without the last of {name}", buffers[:-1]), (f"without the first of {name}", buffers[1:])]
        others += [("without " + name, ()), (f"{name} and one more", (*buffers, some))]
        others += [(f"{name} and their last again", (*buffers, *buffers[-1:])), (f"twice the {name}", buffers * 2)]
        others += [(f"{name} and forty more", (*buffers, *[some] * 40))]
        for what, changed in others:
            both = (changed, call.results) if name == "operands" else (call.operands, changed)
            yield what, call.with_buffers(*both)


def _of_attributes(call):
    for name, value in call.attributes.items():
        rest = {other: kept for other, kept in call.attributes.items() if other != name}
        yield f"without {name}", dataclasses.replace(call, attributes=rest)
        yield f"{name} by another name", dataclasses.replace(call, attributes=rest | {name + "_": value})
        for other in _other_values(value):
            yield f"{name} = {other!r:.60}", call.having(**{name: other})
    yield "an attribute more", call.having(zzz=np.int32(1))
    yield "no attributes", dataclasses.replace(call, attributes={})


def _other_values(value):
    yield from (np.int32(1), np.int64(1), np.float32(1), np.float64(1), True, False, "text", np.zeros(2, np.int32))
    if isinstance(value, str):
        yield from TEXTS
    elif isinstance(value, np.ndarray):
        yield from _other_lists(value)
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: other} for other in _other_values(inside))
    elif isinstance(value, np.integer):
        limits = np.iinfo(value.dtype)
        yield from (value.dtype.type(number) for number in INTEGERS if limits.min <= number <= limits.max)
    elif isinstance(value, np.floating):
        yield from map(value.dtype.type, FLOATS)


def _other_lists(value):
    yield from (value[:0], value[:-1], np.append(value, value.dtype.type(0)), value.astype(np.int64), value[::-1])
    limits = np.iinfo(value.dtype)
    for place in sorted({*range(min(len(value), 3)), *range(0, len(value), 7)})[:16]:
        for number in (*INTEGERS, 2, 3, 32, 48, 64, 256):
            if limits.min <= number <= limits.max:
                changed = value.copy()
                changed[place] = number
                yield changed


def has_memory(call: Call) -> bool:
    """Whether every buffer is as large as its dims say. If not, the handler must refuse the call."""
    extents = (math.prod(buffer.shape) * BYTES[buffer.dtype] for buffer in (*call.operands, *call.results))
    return all(0 <= extent <= MOST_BYTES for extent in extents)
