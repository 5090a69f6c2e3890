"""Frequencies of rotary positions that let a model trained on short sequences read longer ones.

    frequency[i] = base^(-2i / features)        before scaling, in radians a token

    RotaryScaling    low frequencies are divided, as in Llama 3.1
    LinearScaling    all frequencies are divided
    DynamicScaling   the base grows with the length of a sequence that is longer than in training
    YarnScaling      low frequencies are divided, by where they stand among the features; rotated features are scaled
    LongRopeScaling  each frequency has its own divisor, another one for long sequences; rotated features are scaled

Each has `frequencies(base, features, length)`: f32[features / 2], for a sequence of `length` tokens, a Python integer
or a traced one. Its `amplitude` multiplies the rotated features.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_bool, check_integer, check_number

Length = int | jax.Array


class Scaling(Protocol):
    """What `rotate` asks of a scaling."""

    @property
    def amplitude(self) -> float:
        """The factor of rotated features."""
        ...

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """The frequencies f32[features / 2], in radians a token, for a sequence of this length."""
        ...


def plain_frequencies(base: float | jax.Array, features: int) -> jax.Array:
    half = features // 2
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Frequencies of rotary positions for longer sequences, as in Llama 3.1.

    The formula is `apply_scaling` in https://github.com/meta-llama/llama-models, models/llama3/model.py. A pair that
    makes `high_frequency_factor` turns or more within `original_length` tokens keeps its frequency. With
    `low_frequency_factor` turns or fewer the frequency is divided by `factor`. Between these the two are interpolated,
    linearly in the number of turns.

    Args:
      factor: the divisor of low frequencies; at least 1.
      low_frequency_factor, high_frequency_factor: in turns.
      original_length: the sequence length of the first training, in tokens.

    Raises:
      ValueError: if a field is not a number in its range, or `high_frequency_factor` is not above the low one.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.RotaryScaling(factor=8.0)
      >>> scaling.slowed(jnp.array([1.0, 1e-4])) / jnp.array([1.0, 1e-4])
      Array([1.   , 0.125], dtype=float32)
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    kind: ClassVar[str] = "llama3"

    def __post_init__(self):
        check_number("factor of a RotaryScaling", self.factor, "of at least 1", lambda factor: factor >= 1)
        check_integer("original_length of a RotaryScaling", self.original_length)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        check_number("low_frequency_factor", low, "above 0", lambda turns: turns > 0)
        check_number("high_frequency_factor", high, f"above the low one, {low}", lambda turns: turns > low)

    def slowed(self, frequency: jax.Array) -> jax.Array:
        """The frequencies f32[head_dim / 2], in radians a token, of a model with this scaling."""
        turns = self.original_length / (2 * math.pi) * frequency
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """`slowed`, for any length."""
        del length
        return self.slowed(plain_frequencies(base, features))


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies of rotary positions divided by one factor (https://arxiv.org/abs/2306.15595).

    Args:
      factor: the divisor; above 0.
      kind: "linear", which tells the scalings in a file apart.

    Raises:
      ValueError: if a field has another value.

    Example:
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.LinearScaling(factor=8.0)
      >>> scaling.frequencies(10_000.0, 4, length=1024)
      Array([0.125  , 0.00125], dtype=float32)
    """

    factor: float
    kind: str = "linear"

    def __post_init__(self):
        _check_kind(self, "linear")
        _check_positive(self, "factor")

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """The frequencies f32[features / 2], in radians a token, for any length."""
        del length
        return plain_frequencies(base, features) / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """A base of rotary positions that grows with the length of a sequence, if it is longer than those in training.

    With `length` the tokens of the sequence, at least `original_length`, the base is multiplied by
    `(factor * length / original_length - (factor - 1)) ** (features / (features - 2))`, as in `transformers`. Keys in
    the cache of `generate` keep the frequencies of the length at which they were written.

    Args:
      factor: how fast the base grows; at least 1.
      original_length: tokens of the sequences in training.
      kind: "dynamic", which tells the scalings in a file apart.

    Raises:
      ValueError: if a field has another value.

    Example:
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.DynamicScaling(factor=2.0, original_length=1024)
      >>> scaling.frequencies(10_000.0, 4, length=1024)
      Array([1.  , 0.01], dtype=float32)
    """

    factor: float
    original_length: int
    kind: str = "dynamic"

    def __post_init__(self):
        _check_kind(self, "dynamic")
        check_number(f"factor of a {type(self).__name__}", self.factor, "of at least 1", lambda factor: factor >= 1)
        check_integer("original_length of a DynamicScaling", self.original_length)

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """The frequencies f32[features / 2], in radians a token, for a sequence of this length."""
        tokens = jnp.maximum(jnp.asarray(length, jnp.float32), self.original_length)
        growth = self.factor * tokens / self.original_length - (self.factor - 1)
        return plain_frequencies(base * growth ** (features / (features - 2)) if features > 2 else base, features)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies of rotary positions for longer sequences, as in YaRN (https://arxiv.org/abs/2309.00071, section 3).

    A pair that makes `beta_fast` turns or more within `original_length` tokens keeps its frequency. With `beta_slow`
    turns or fewer the frequency is divided by `factor`. Between these the two are interpolated, linearly in the number
    of the pair.

    Args:
      factor: the divisor of low frequencies; at least 1.
      original_length: the sequence length of the first training, in tokens.
      beta_fast, beta_slow: in turns.
      attention_factor: multiplies rotated queries and keys; None is `0.1 ln(factor) + 1`.
      truncate: round the numbers of the pairs where interpolation begins and ends, to integers.
      kind: "yarn", which tells the scalings in a file apart.

    Raises:
      ValueError: if a field has another value.

    Example:
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.YarnScaling(factor=4.0, original_length=4096)
      >>> scaling.frequencies(10_000.0, 4, length=8192), round(scaling.amplitude, 4)
      (Array([1.     , 0.00625], dtype=float32), 1.1386)
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    kind: str = "yarn"

    def __post_init__(self):
        _check_kind(self, "yarn")
        check_number("factor of a YarnScaling", self.factor, "of at least 1", lambda factor: factor >= 1)
        check_integer("original_length of a YarnScaling", self.original_length)
        _check_positive(self, "beta_slow")
        slow = self.beta_slow
        check_number("beta_fast of a YarnScaling", self.beta_fast, f"above beta_slow, {slow}", lambda beta: beta > slow)
        if self.attention_factor is not None:
            _check_positive(self, "attention_factor")
        check_bool("truncate of a YarnScaling", self.truncate)

    @property
    def amplitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """The frequencies f32[features / 2], in radians a token, for any length."""
        del length
        first, last = (
            features * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        first, last = (math.floor(first), math.ceil(last)) if self.truncate else (first, last)
        first, last = max(first, 0), min(last, features - 1)
        width = last - first if last != first else 0.001
        divided = jnp.clip((jnp.arange(features // 2, dtype=jnp.float32) - first) / width, 0, 1)
        frequency = plain_frequencies(base, features)
        return frequency * (1 - divided) + frequency / self.factor * divided


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Frequencies of rotary positions with a divisor each, as in LongRoPE (https://arxiv.org/abs/2402.13753) and Phi-3.

    Sequences of more than `original_length` tokens have divisors of their own. Which ones apply depends on the largest
    position of an array, so on the longest sequence of a batch, or of a device's part of it. Keys in the cache of
    `generate` keep the frequencies with which they were written.

    Args:
      short_factors: the divisor of each frequency, half as many as rotated features.
      long_factors: the same for longer sequences.
      original_length: tokens up to which `short_factors` apply.
      attention_factor: multiplies rotated queries and keys.
      kind: "longrope", which tells the scalings in a file apart.

    Raises:
      ValueError: if a field has another value.

    Example:
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.LongRopeScaling(short_factors=(1.0, 1.0), long_factors=(1.0, 2.0), original_length=1024)
      >>> scaling.frequencies(10_000.0, 4, length=2048)
      Array([1.   , 0.005], dtype=float32)
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0
    kind: str = "longrope"

    def __post_init__(self):
        _check_kind(self, "longrope")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not isinstance(factors, tuple | list) or not factors:
                raise ValueError(f"{name} of a LongRopeScaling must be a tuple of numbers, got {factors!r}")
            object.__setattr__(self, name, tuple(factors))
            for factor in factors:
                check_number(f"{name} of a LongRopeScaling", factor, "above 0", lambda factor: factor > 0)
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                "short_factors and long_factors of a LongRopeScaling must be equally many, got "
                f"{len(self.short_factors)} and {len(self.long_factors)}"
            )
        check_integer("original_length of a LongRopeScaling", self.original_length)
        _check_positive(self, "attention_factor")

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    def frequencies(self, base: float, features: int, length: Length) -> jax.Array:
        """The frequencies f32[features / 2], in radians a token, for a sequence of this length."""
        if len(self.short_factors) != features // 2:
            raise ValueError(
                f"a LongRopeScaling must have a factor for each of {features // 2} pairs of rotated features, got "
                f"{len(self.short_factors)}; change rotary_fraction or the factors"
            )
        is_long = jnp.asarray(length) > self.original_length
        factors = jnp.where(is_long, jnp.float32(self.long_factors), jnp.float32(self.short_factors))
        return plain_frequencies(base, features) / factors


SCALINGS = {"linear": LinearScaling, "dynamic": DynamicScaling, "yarn": YarnScaling, "longrope": LongRopeScaling}


def scaling_from(described: object) -> object:
    """The scaling that a dict of its fields describes, a `RotaryScaling` if it has no `kind`. What is no dict is
    returned as it is.
    """
    if not isinstance(described, dict):
        return described
    kind = described.get("kind")
    if kind is not None and (not isinstance(kind, str) or kind not in SCALINGS):
        raise ValueError(f"the kind of a rotary_scaling must be one of {', '.join(SCALINGS)}, got {kind!r}")
    return RotaryScaling(**described) if kind is None else SCALINGS[kind](**described)


def _check_kind(scaling: LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling, kind: str) -> None:
    if scaling.kind != kind:
        raise ValueError(f"kind of a {type(scaling).__name__} must be {kind!r}, got {scaling.kind!r}; leave it out")


def _check_positive(scaling: object, name: str) -> None:
    of = f"{name} of a {type(scaling).__name__}"
    check_number(of, getattr(scaling, name), "above 0", lambda value: value > 0)
