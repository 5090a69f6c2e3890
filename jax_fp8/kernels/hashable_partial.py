"""Partial functions that compare equal when they do the same.

jax caches a trace by its function. Each call of an operation makes a new `functools.partial`, which equals no other, so
its trace would never be found again.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from jax_fp8.core.types import PyTree


@dataclass(frozen=True)
class HashablePartial:
    """A function with some of its arguments. Unlike a `functools.partial` it equals one with the same contents."""

    function: Callable
    args: tuple
    keywords: tuple[tuple[str, object], ...]

    def __call__(self, *args: object, **keywords: object) -> PyTree:
        return self.function(*self.args, *args, **dict(self.keywords), **keywords)


def hashable(function: Callable) -> Callable:
    """A `functools.partial`, also of partials, as a `HashablePartial`; any other function unchanged."""
    if not isinstance(function, functools.partial):
        return function
    keywords = tuple((name, hashable(value)) for name, value in sorted(function.keywords.items()))
    return HashablePartial(hashable(function.func), tuple(map(hashable, function.args)), keywords)


def is_hashable(value: object) -> bool:
    """Whether it has a hash. A user's value inside of a function, such as the formula of a scale, may have none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
