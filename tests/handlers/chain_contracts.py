"""Valid calls of a chain: right calls of its links one after the other, some with what another has made."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from handlers.arrays import ONE, floats
from handlers.calls import BF16, E4M3, F32, Buffer, Call
from handlers.generation_contracts import cached_attention
from handlers.product_contracts import few_rows

# (link, operand): the link and its result that is this operand, and the first byte there.
Wires = dict[tuple[int, int], tuple[int, int, int]]


def chain() -> Iterator[Call]:
    yield linked([next(few_rows())])
    yield layer()
    for attention in itertools.islice(cached_attention(), 2):
        yield linked([attention, largest_of(attention)], {(1, 0): (0, 0, 0)})


def layer() -> Call:
    """A product in two parts, of which the second is normalized; and what reads that."""
    m, k = 3, 64
    how = next(few_rows()).attributes | {"has_bias": False, "has_c": False, "scaling": "", "first_column": np.int64(0)}
    first = Call(
        "few_rows_gemm",
        (Buffer(BF16, (m, k), 29), Buffer(E4M3, (2 * k, k), 30), floats(3), ONE, floats(k)),
        (Buffer(BF16, (m, 2 * k)), Buffer(E4M3, (m, k))),
        how | {"norm": "rmsnorm", "casts": True, "a_row": np.int32(1), "second_part": np.int64(k)},
    )
    second = Call(
        "few_rows_gemm",
        (Buffer(BF16, (m, k)), Buffer(E4M3, (k, k), 31), ONE, ONE, Buffer(BF16, (m, k))),
        (Buffer(BF16, (m, k)),),
        how | {"has_c": True},
    )
    return linked([first, second], {(1, 0): (0, 0, 2 * m * k), (1, 4): (0, 0, 0)})


def largest_of(attention: Call) -> Call:
    """The largest magnitude of what attention returns."""
    result = attention.results[0]
    return Call("amax", (Buffer(result.dtype, (1, math.prod(result.shape))),), (Buffer(F32, ()),))


def linked(links: list[Call], wires: Wires | None = None) -> Call:
    """The call of a chain of these links."""
    wires, arrays, operands, results, attributes, first_result = wires or {}, [], [], [], {}, []
    for number, link in enumerate(links):
        arrays += [len(link.operands), len(link.results)]
        places = []
        for position, operand in enumerate(link.operands):
            if (number, position) in wires:
                of_link, result, offset = wires[number, position]
                places.append((-1 - (first_result[of_link] + result), offset))
            else:
                places.append((len(operands), 0))
                operands.append(operand)
            arrays += [*places[-1], operand.dtype, len(operand.shape), *operand.shape]
        first_result.append(len(results))
        for result in link.results:
            arrays += [-1 - len(results), 0, result.dtype, len(result.shape), *result.shape]
            alias = places[result.alias][0] if result.alias >= 0 else -1
            results.append(Buffer(result.dtype, result.shape, result.content, alias=alias))
        attributes[f"link_{number:04}"] = dict(link.attributes)
    attributes |= {"targets": " ".join(f"jax_fp8_{link.target}" for link in links)}
    return Call("chain", tuple(operands), tuple(results), attributes | {"arrays": np.array(arrays, np.int64)})
