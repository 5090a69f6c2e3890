"""Oracles in NumPy, which share no code with the library, and the tolerances for results that are not exact.

The cast to FP8, amaxes and scales are exact: compare their bits with `assert_same_bits`. Sums in another order and
values after a rounding to 8 bits are not: compare them with `assert_close`. Its error is relative to the norm of the
whole expected array, so an array of zeros has the error 1, which no tolerance here accepts.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

FP8_MAX = {np.dtype(ml_dtypes.float8_e4m3fn): np.float32(448), np.dtype(ml_dtypes.float8_e5m2): np.float32(57344)}
SMALLEST_NORMAL = {dtype: np.float32(2.0**exponent) for dtype, exponent in zip(FP8_MAX, (-6, -14), strict=True)}
SMALLEST_SCALE = np.float32(2.0**-126)  # its reciprocal is finite
NAN_BYTE = 0x7F  # one NaN for both formats: positive, all mantissa bits set

# The largest norm(actual - expected) / norm(expected), with its reason. Rounding to b mantissa bits changes a number by
# at most 2**-(b+1) of it, and in this norm by about 0.42 times that. Independent errors of two factors add in
# quadrature. "On average" below is measured for normally distributed numbers.
TOLERANCE = {
    "float32": 1e-5,  # f32 sums of up to some thousand terms, in another order
    "float16": 1e-3,  # one rounding to 10 bits is 2e-4 on average; a few of them
    "bfloat16": 8e-3,  # one rounding to 7 bits is 1.6e-3 on average; a chain of some ten
    "gemm_float32": 1e-5,  # FP8 products are exact in f32; split accumulation adds them in f32
    "gemm_bfloat16": 3e-3,  # the same, and one rounding of the result
    "gemm_fast": 3e-3,  # fast accumulation keeps about 13 bits of a partial sum
    "float8_e4m3fn": 0.04,  # quantizing: 3 mantissa bits, 0.026 on average, more where small values become subnormal
    "float8_e5m2": 0.07,  # quantizing: 2 mantissa bits, 0.053 on average
    "linear": 0.05,  # E4M3 times E4M3 against f32: 0.037 on average
    "linear_gradient": 0.08,  # E5M2 times E4M3 against f32: 0.059 on average
    "block": 0.12,  # a Transformer block of four such layers, forward
    "block_gradient": 0.2,  # and its gradients
}


def amax(x) -> np.float32:
    """Largest magnitude in float32, infinity and NaN included; 0 for an empty array."""
    magnitudes = np.abs(np.asarray(x).astype(np.float32))
    return np.float32(np.max(magnitudes, initial=0))


def amax_of_numbers(x) -> np.float32:
    """Largest magnitude in float32, infinity included, NaNs ignored; 0 if there are only NaNs, or nothing."""
    magnitudes = np.abs(np.asarray(x).astype(np.float32))
    return np.float32(np.max(magnitudes, where=~np.isnan(magnitudes), initial=0))


def quantize(x, dtype, scale) -> tuple[np.ndarray, np.float32]:
    """FP8 values and amax: `saturate(f32(x) * (1 / scale))`, each operation rounded in f32, then once to FP8."""
    x, dtype = np.asarray(x).astype(np.float32), np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * (np.float32(1) / np.float32(scale))
    rounded = np.clip(scaled, -FP8_MAX[dtype], FP8_MAX[dtype]).astype(dtype)
    return np.where(np.isnan(scaled), np.uint8(NAN_BYTE).view(dtype), rounded), amax(x)


def dequantize(values, scale) -> np.ndarray:
    """`values * scale`, in float64."""
    return np.asarray(values).astype(np.float64) * np.float64(scale)


def scale_from_amax(amax, dtype, margin=0):
    """`amax * 2**margin / fp8_max` for every amax, clipped to 2**-126 and 2**126; 1 where it is 0 or not finite."""
    amax = np.asarray(amax, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = amax * np.float32(2.0**margin) / FP8_MAX[np.dtype(dtype)]
    scale = np.clip(scale, SMALLEST_SCALE, 1 / SMALLEST_SCALE)
    return np.where(np.isfinite(amax) & (amax > 0), scale, np.float32(1))[()]


def current_scale(amax, dtype, amax_epsilon=0.0, power_2_scale=False, margin=0):
    """The scale of a tensor from its own amax; from an array of amaxes, an array of scales."""
    scale = scale_from_amax(np.maximum(np.asarray(amax, np.float32), np.float32(amax_epsilon)), dtype, margin)
    if not power_2_scale:
        return scale
    _, exponent = np.frexp(1 / scale.astype(np.float64))  # 1 / scale = mantissa * 2**exponent, mantissa in [0.5, 1)
    return np.ldexp(np.float32(1), 1 - exponent)


def quantize_by_tile(x, dtype, tile, scale_of=scale_from_amax) -> tuple[np.ndarray, np.ndarray]:
    """FP8 values of a matrix and the scales of its tiles. Each tile is cast like a tensor of its own, by its own amax.
    Tiles at the edges may be cut.
    """
    (m, n), (rows, columns) = x.shape, tile
    values, scales = np.empty(x.shape, dtype), np.empty((-(-m // rows), -(-n // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = scale_of(amax_of_numbers(x[part]), dtype)
        values[part] = quantize(x[part], dtype, scales[i, j])[0]
    return values, scales


def update_state(scale, amax_history, dtypes, margin=0, algorithm="max", forget_outliers=False):
    """The delayed update of one GEMM, row by row.

    Args:
      scale: f32[3].
      amax_history: f32[3, L] with staged amaxes in slot 0.
      dtypes: the FP8 dtype of each row.
      algorithm: "max" or "most_recent".
      forget_outliers: whether to ignore amaxes at whose scale the staged one is below the smallest normal FP8 number.

    Returns:
      The new scale f32[3] and history f32[3, L]. A row that did not run, or whose staged amax is not finite, is as it
      was before staging.
    """
    scale, amax_history = np.array(scale, np.float32), np.array(amax_history, np.float32)
    for row, dtype in enumerate(dtypes):
        history = amax_history[row]
        staged = history[0]
        if staged != 0 and np.isfinite(staged):
            amaxes = history
            if forget_outliers:
                largest_ratio = FP8_MAX[np.dtype(dtype)] / SMALLEST_NORMAL[np.dtype(dtype)]
                with np.errstate(all="ignore"):
                    limit = staged * largest_ratio * np.float32(np.ldexp(1.0, -margin))
                amaxes = np.where(history > limit, staged, history)
            scale[row] = scale_from_amax(amaxes.max() if algorithm == "max" else staged, dtype, margin)
            history[:] = np.roll(history, -1)  # the staged one is now last; the oldest came to slot 0
        history[0] = 0
    return scale, amax_history


def count_amaxes(staged, scale, dtypes) -> np.ndarray:
    """How many staged amaxes f32[rows] are not finite, and how many are below the smallest normal FP8 number at the
    scale f32[rows] of their step; int32[2]. `dtypes` are those of three rows, and repeat.
    """
    smallest = np.resize([SMALLEST_NORMAL[np.dtype(dtype)] for dtype in dtypes], len(scale)).astype(np.float32)
    return np.array([np.sum(~np.isfinite(staged)), np.sum((staged > 0) & (staged < scale * smallest))], np.int32)


def matmul(a, b, a_scale=1.0, b_scale=1.0, bias=None, c=None, alpha=1.0) -> np.ndarray:
    """`alpha (a * a_scale) @ (b * b_scale).T + bias + c` in float64, of a (m, k) and b (n, k), Hopper's layout."""
    product = alpha * dequantize(a, a_scale) @ dequantize(b, b_scale).T
    for addend in (bias, c):
        if addend is not None:
            product = product + np.asarray(addend).astype(np.float64)
    return product


def linear(x, kernel, output_gradient) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A layer without FP8, in float64: `y = x @ kernel` of (m, k) and (k, n), dx and dkernel for a dy (m, n)."""
    x, kernel, dy = (np.asarray(array).astype(np.float64) for array in (x, kernel, output_gradient))
    return x @ kernel, dy @ kernel.T, x.T @ dy


def attention(query, key, value, output_gradient=None, causal=False):
    """Attention (batch, seq, heads, head_dim) in float64, of keys and values (batch, keys, kv_heads, head_dim).

    Returns:
      The output; for an output gradient followed by the gradients of query, key, value and of the scores
      (batch, heads, seq, keys).
    """
    q, k, v = (np.asarray(array).astype(np.float64).swapaxes(1, 2) for array in (query, key, value))
    groups, size = q.shape[1] // k.shape[1], 1 / np.sqrt(q.shape[-1])
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = q @ k.swapaxes(2, 3) * size
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = (weights @ v).swapaxes(1, 2)
    if output_gradient is None:
        return output
    dy = np.asarray(output_gradient).astype(np.float64).swapaxes(1, 2)
    dweights = dy @ v.swapaxes(2, 3)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * size

    def of_group(gradient):  # the sum over the heads that share a key
        return gradient.reshape(len(gradient), -1, groups, *gradient.shape[2:]).sum(2).swapaxes(1, 2)

    dkey, dvalue = of_group(dscores.swapaxes(2, 3) @ q), of_group(weights.swapaxes(2, 3) @ dy)
    return output, (dscores @ k).swapaxes(1, 2), dkey, dvalue, dscores


def adam(gradient, master, mu, nu, coefficients, decays=True, adam_w_mode=True, precision=np.float32):
    """One step of Adam, every operation rounded to `precision`.

    Args:
      gradient, master, mu, nu: arrays; `nu` is the second moment itself.
      coefficients: a mapping with the names of `ops.adam.Coefficients`.
      decays: whether weight decay applies.
      adam_w_mode: decoupled weight decay, else an L2 term.

    Returns:
      The moments, the master and the update that was added to it, not yet rounded to the dtypes of storage.
    """
    c = {name: precision(number) for name, number in coefficients.items()}
    g, p, m, v = (np.asarray(array).astype(np.float32).astype(precision) for array in (gradient, master, mu, nu))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        g = g * c["grad_scale"]
        if decays and not adam_w_mode:
            g = g + c["weight_decay"] * p
        m = c["b1"] * m + c["one_minus_b1"] * g
        v = c["b2"] * v + c["one_minus_b2"] * np.square(g)
        u = (m * c["correction1"]) / (np.sqrt(v * c["correction2"]) + c["eps"])
        if decays and adam_w_mode:
            u = u + c["weight_decay"] * p
        update = -(c["rate"] * u)
        return m, v, p + update, update


def off_the_tie(master) -> np.ndarray:
    """Float32 numbers, of which those halfway between two bfloat16 that round away from zero are moved by one unit in
    the last place, also away from zero.
    """
    master = np.asarray(master, np.float32)
    truncated = (_words(master) & np.uint32(0xFFFF0000)).view(np.float32).reshape(master.shape)
    halfway = (_words(master) & np.uint32(0xFFFF) == 0x8000).reshape(master.shape)
    away = halfway & (np.abs(master.astype(ml_dtypes.bfloat16).astype(np.float32)) > np.abs(truncated))
    with np.errstate(over="ignore"):
        return np.where(away, np.nextafter(master, np.copysign(np.float32(np.inf), master)), master)


def remainder(master) -> np.ndarray:
    """The low 16 bits of float32 numbers, uint16."""
    return (_words(master) % 2**16).astype(np.uint16).reshape(np.shape(master))


def round_at_random(x, draw, never_zero=False) -> np.ndarray:
    """Stochastic rounding of float32 to one of the two neighbouring bfloat16, by the upper 16 bits of `draw`."""
    x = np.asarray(x, np.float32)
    magnitude = np.abs(x).view(np.uint32).astype(np.uint64)
    below, lost = magnitude >> np.uint64(16), magnitude % 2**16
    up = lost + (draw >> np.uint32(16)) >= 2**16
    chosen = np.where(up & (below < 0x7F7F), below + np.uint64(1), below)
    if never_zero:
        chosen = np.where((chosen == 0) & (x > 0), 1, chosen)
    chosen = np.where(np.isnan(x), 0x7FC0, chosen).astype(np.uint16)
    return (chosen | (np.signbit(x).astype(np.uint16) << np.uint16(15))).view(ml_dtypes.bfloat16)


def quantize_at_random(x, dtype, scale, draw) -> np.ndarray:
    """Stochastic rounding of `x / scale` to one of the two neighbours in the table of FP8 magnitudes, by the upper 20
    bits of `draw`.
    """
    scaled = np.asarray(x, np.float32) * (np.float32(1) / np.float32(scale))
    rounded = np.copysign(_in_steps(np.abs(scaled), dtype, draw), scaled).astype(dtype)
    return np.where(np.isnan(scaled), np.uint8(NAN_BYTE).view(dtype), rounded)


def quantize_root(v, dtype, scale, draw) -> np.ndarray:
    """The same for `sqrt(v) / scale`; the result is never zero where `v` is positive."""
    scaled = np.sqrt(np.asarray(v, np.float32)) * (np.float32(1) / np.float32(scale))
    rounded = _in_steps(scaled, dtype, draw)
    rounded = np.where((rounded == 0) & (scaled > 0), _magnitudes(dtype)[1], rounded).astype(dtype)
    return np.where(np.isnan(scaled), np.uint8(NAN_BYTE).view(dtype), rounded)


def _in_steps(x, dtype, draw):
    table = _magnitudes(dtype)
    x = np.where(np.isnan(x), np.float32(0), np.minimum(x, table[-1]))
    above = np.clip(np.searchsorted(table, x, side="right"), 1, table.size - 1)
    step = table[above] - table[above - 1]
    fraction = (np.asarray(draw) // 2**12).astype(np.float32) / np.float32(2**20)
    return np.minimum(np.floor(x / step + fraction) * step, table[-1])


def _magnitudes(dtype) -> np.ndarray:
    table = np.arange(0x7F, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)
    return table[np.isfinite(table)]


class Draws(NamedTuple):
    """The random numbers by which the two moments are rounded."""

    nu: np.ndarray
    mu: np.ndarray


def draws(shape, seed, leaf, first=0) -> Draws:
    """A uint32 for every element of an array, a hash of its index, where the first element has the index `first`.
    Computed in uint64 modulo 2**32.
    """
    index = np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape) + np.uint64(first)
    return draws_at(index, seed, leaf)


def draws_at(index, seed, leaf) -> Draws:
    """The same for given indices, uint64."""
    modulus = np.uint64(2**32)
    h = (index % modulus) * np.uint64(0x9E3779B1) % modulus + (index // modulus) * np.uint64(0x27D4EB2F) % modulus
    h = (h + np.uint64((int(seed) * 0x85EBCA77 + leaf * 0xC2B2AE3D) % 2**32)) % modulus
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor) % modulus
    h = h ^ (h >> np.uint64(16))
    second = (h ^ (h >> np.uint64(15))) * np.uint64(0x2C1B3C6D) % modulus
    return Draws(h.astype(np.uint32), second.astype(np.uint32))


def relative_error(actual, expected) -> float:
    """norm(actual - expected) / norm(expected), infinite if anything is NaN; refuses an expected array of zeros."""
    actual, expected = (np.asarray(array).astype(np.float64) for array in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes must be equal, got {actual.shape} and {expected.shape}")
    size = np.linalg.norm(expected.ravel())
    if not (np.isfinite(size) and size > 0):
        raise AssertionError(f"an expected array must be finite and not all zero, got one of norm {size}")
    error = np.linalg.norm((actual - expected).ravel()) / size
    return float(np.inf if np.isnan(error) else error)


def assert_close(actual, expected, kind: str) -> None:
    """Raise unless the relative error is within `TOLERANCE[kind]`."""
    error = relative_error(actual, expected)
    if not error <= TOLERANCE[kind]:
        raise AssertionError(f"relative error must be within {TOLERANCE[kind]} ({kind}), got {error:.3g}")


def assert_same_bits(actual, expected) -> None:
    """Raise unless dtype, shape and every bit are equal: -0 is not 0. In float32 all NaNs count as equal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"must both be {expected.dtype}{expected.shape}, got {actual.dtype}{actual.shape}")
    unequal = np.flatnonzero(_bits(actual) != _bits(expected))
    if unequal.size:
        first = unequal[0]
        got, wanted = actual.ravel()[first], expected.ravel()[first]
        raise AssertionError(f"{unequal.size} of {actual.size} elements differ, first at {first}: {got} for {wanted}")


def _bits(array):
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _words(array):
    return np.ascontiguousarray(np.asarray(array, np.float32)).reshape(-1).view(np.uint32)
