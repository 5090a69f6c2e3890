"""Forms of an operation, kernel or reference, as values: two that do the same are equal.

jax keeps the trace of a function for as long as it is asked for that function. A `functools.partial` is made anew for
every call of an operation, and equal to no other one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HashablePartial:
    """A function with some of its arguments, equal to any other that is the same with the same, unlike a
    `functools.partial`.
    """

    function: Callable
    args: tuple
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*self.args, *args, **dict(self.keywords), **keywords)


def hashable(function: Callable) -> Callable:
    """A `functools.partial`, of partials perhaps, as a `HashablePartial`; any other function as it is."""
    if not isinstance(function, functools.partial):
        return function
    keywords = tuple((name, hashable(value)) for name, value in sorted(function.keywords.items()))
    return HashablePartial(hashable(function.func), tuple(map(hashable, function.args)), keywords)


def is_hashable(value: Any) -> bool:
    """Whether it has a hash: what a user has put into a form, such as the formula of a scale, need not have one."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
