"""Calls of the attention of a new token to a cache, and in NumPy what they must return.

    problem = make(group=4, head_dim=128, cache=E4M3)
    check(problem, results)

What is written is compared bit for bit, and the attention with float64.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import reference
from reference import assert_same_bits

BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
# What a result is off by, relative to the largest |weight value| it may have: float32 sums of some hundred terms, with
# exponentials off by 2**-22; and one rounding to the dtype.
SUMS = 4e-6
ROUNDING = {np.dtype(np.float32): 2**-24, np.dtype(BFLOAT16): 2**-8, np.dtype(np.float16): 2**-11}


@dataclass(frozen=True)
class Problem:
    """The arrays and numbers of a call, as for `attend_to_cache`; 0 for no window and no cap."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scales: tuple[np.ndarray, np.ndarray] | None
    lengths: np.ndarray
    step: int
    prompt_slots: int
    rotary: tuple[np.ndarray, np.ndarray] | None
    window: int = 0
    scale: float = 0.1
    logit_cap: float = 0.0

    @property
    def own(self):
        return self.prompt_slots + self.step


def is_seen(problem):
    """bool[batch, slots], the new token's own slot included."""
    slots, lengths = np.arange(problem.keys.shape[2]), problem.lengths[:, None]
    number = slots - problem.prompt_slots
    seen = np.where(number < 0, slots < lengths, number <= problem.step)
    positions = np.where(number < 0, slots, lengths + number)
    return seen & (positions > lengths + problem.step - problem.window) if problem.window else seen


def make(
    dtype=BFLOAT16,
    cache=None,
    batch=2,
    kv_heads=1,
    group=2,
    head_dim=16,
    slots=40,
    prompt_slots=24,
    lengths=None,
    step=5,
    pairs=0,
    size=1.0,
    **how,
):
    """A call with random arrays, and NaN in every slot that is not seen.

    Args:
      dtype, cache: of the new token; of the cache, None for the same.
      group: queries of a key head.
      lengths: of the first rows.
      pairs: of features that are rotated.
      size: of the numbers.
      how: further fields of the problem.
    """
    random = np.random.default_rng(head_dim + 7 * group + step)

    def normal(*shape, of=dtype):
        return (size * random.normal(size=shape)).astype(of)

    cache = dtype if cache is None else cache
    shape = (batch, kv_heads, slots, head_dim)
    keys, values = normal(*shape, of=cache), normal(*shape, of=cache)
    scales = tuple(np.exp2(random.uniform(-3, 1, shape[:3])).astype(np.float32) for _ in range(2))
    angles = random.uniform(0, 6, (batch, pairs)).astype(np.float32)
    lengths = np.asarray([prompt_slots, 1, 7] if lengths is None else lengths, np.int32)[:batch]
    problem = Problem(
        *(
            normal(batch, kv_heads, group, head_dim),
            normal(batch, kv_heads, head_dim),
            normal(batch, kv_heads, head_dim),
        ),
        *(keys, values, scales if cache == E4M3 else None, lengths, step, prompt_slots),
        (np.cos(angles), np.sin(angles)) if pairs else None,
        **how,
    )
    unseen = np.broadcast_to(~is_seen(problem)[:, None], shape[:3]).copy()
    unseen[:, :, problem.own] = True
    for array in (keys, values, *(problem.scales or ())):
        array[unseen] = np.nan
    return problem


def make_haystack(slot, **shape):
    """A call in which every query is for the key of one slot, the needle: its weight is more than 0.9, and all others
    share the rest. `shape` is that of `make`; all rows have whole prompts, and nothing is rotated.
    """
    problem = make(**shape | {"lengths": [shape["prompt_slots"]] * shape.get("batch", 2)})
    query = problem.query[:, :, :1].repeat(problem.query.shape[2], axis=2)
    key = query[:, :, 0].astype(np.float32)
    # Of 32,768 keys as large as the needle, some would be nearly as near to a query.
    if problem.scales is None:
        problem.keys[...] = (problem.keys.astype(np.float32) / 4).astype(problem.keys.dtype)
    else:
        np.minimum(problem.scales[0], 0.25, out=problem.scales[0])
        problem.scales[0][:, :, slot] = 1
    problem.keys[:, :, slot] = key.astype(problem.keys.dtype)
    largest = np.sum(np.square(key), axis=-1).min()  # of all heads the smallest product with the needle
    return replace(problem, query=query, scale=float(np.log(20 * shape["slots"]) / largest))


def rotated(x, rotary):
    """`x` (batch, kv_heads, ..., features): float32 after every operation, then rounded."""
    if rotary is None:
        return x
    pairs = rotary[0].shape[1]
    cos, sin = (wave.reshape(len(wave), *(1,) * (x.ndim - 2), pairs) for wave in rotary)
    first, second = x[..., :pairs].astype(np.float32), x[..., pairs : 2 * pairs].astype(np.float32)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate([*(part.astype(x.dtype) for part in parts), x[..., 2 * pairs :]], axis=-1)


def written(problem):
    """Keys, values and scales with the new row."""
    key, arrays = rotated(problem.key, problem.rotary), [problem.keys.copy(), problem.values.copy()]
    if problem.scales is None:
        for array, row in zip(arrays, (key, problem.value), strict=True):
            array[:, :, problem.own] = row
        return arrays
    scales = [array.copy() for array in problem.scales]
    for array, scale, rows in zip(arrays, scales, (key, problem.value), strict=True):
        for at in np.ndindex(rows.shape[:2]):
            scale[(*at, problem.own)] = reference.scale_from_amax(reference.amax(rows[at]), E4M3)
            array[(*at, problem.own)] = reference.quantize(rows[at], E4M3, scale[(*at, problem.own)])[0]
    return [*arrays, *scales]


def attend(problem, rows):
    """The attention in float64, and for each result what its error is relative to."""
    keys, values, *scales = rows
    seen = is_seen(problem)[:, None, :, None]
    keys, values = (np.where(seen, array.astype(np.float64), 0) for array in (keys, values))
    if scales:
        keys, values = (
            array * np.where(seen, scale[..., None], 1) for array, scale in zip((keys, values), scales, strict=True)
        )
    query = rotated(problem.query, problem.rotary).astype(np.float64)
    products = np.einsum("bkgd,bksd->bkgs", query, keys) * np.float32(problem.scale)
    sizes = np.einsum("bkgd,bksd->bkgs", np.abs(query), np.abs(keys)) * np.float32(problem.scale)
    cap = np.float64(np.float32(problem.logit_cap))
    logits = cap * np.tanh(products / cap) if cap else products
    logits = np.where(seen[:, :, None, :, 0], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    # A logit is off by some ulp of the sum of its magnitudes, and its weight by as much, relatively.
    spread = np.einsum("bkgs,bksd->bkgd", weights * (1 + sizes), np.abs(values))
    return np.einsum("bkgs,bksd->bkgd", weights, values), spread


def error_of(problem, rows, attended):
    """The largest error of the attention to these keys, values and scales, in units of what is allowed."""
    wanted, spread = attend(problem, rows)
    assert attended.dtype == problem.query.dtype
    error = np.abs(attended.astype(np.float64) - wanted)
    least = np.finfo(np.float16).smallest_subnormal if attended.dtype == np.float16 else 0
    bound = SUMS * spread + ROUNDING[attended.dtype] * np.abs(wanted) + least
    return np.max(np.where(np.isfinite(error), error / bound, np.inf), initial=0)


def check(problem, found):
    """Raise unless the results are right: the attention, keys, values, and in FP8 their scales."""
    attended, *caches = found
    expected = written(problem)
    for array, wanted in zip(caches, expected, strict=True):
        assert_same_bits(array, wanted)
    error = error_of(problem, expected, attended)
    assert error <= 1, f"the attention is off by {error:.2f} times what is allowed"
