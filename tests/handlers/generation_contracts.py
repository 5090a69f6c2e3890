"""Valid calls of the targets that only generation uses; as in contracts.py."""

from collections.abc import Iterator

import numpy as np

from handlers.calls import BF16, E4M3, F16, F32, S32, Buffer, Call

SOURCES = (F32, BF16, F16)


def cached_attention() -> Iterator[Call]:
    variants = ((2, 2, 2, 16, 8), (1, 3, 5, 80, 0), (3, 1, 16, 256, 128), (0, 2, 1, 24, 4))
    for number, (batch, heads, queries, head_dim, pairs) in enumerate(variants):
        dtype, slots, steps = SOURCES[number % 3], 7, 2
        of_query, of_key = Buffer(dtype, (batch, heads, queries, head_dim), 25), Buffer(dtype, (batch, heads, head_dim))
        rotary = Buffer(F32, (batch, pairs) if pairs else (0, 0))
        lengths = Buffer(S32, (batch,), np.array([5, 0, 2], np.int32)[:batch])
        step = Buffer(S32, (), np.array(steps - 1, np.int32))
        how = {"prompt_slots": np.int32(slots - steps), "scale": np.float32(0.1), "window": np.int32(number)}
        how |= {"logit_cap": np.float32(number % 2), "attended_row": np.int32(0)}
        for kept in (dtype, E4M3):
            casts = dtype == BF16 and kept == E4M3
            of_result = Buffer(F32, (3,) if casts else (0, 0))
            cache = Buffer(kept, (batch, heads, slots, head_dim), 26)
            scales = Buffer(F32, (batch, heads, slots) if kept == E4M3 else (0, 0))
            operands = (of_query, of_key, of_key, cache, cache, lengths, step, rotary, rotary, scales, scales)
            operands = (*operands, of_result)
            updated = [Buffer(operands[at].dtype, operands[at].shape, alias=at) for at in (3, 4, 9, 10)]
            result, row = Buffer(E4M3 if casts else dtype, of_query.shape), np.int32(2 if casts else 0)
            yield Call("cached_attention", operands, (result, *updated), how | {"attended_row": row})
