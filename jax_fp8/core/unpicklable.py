"""What is made of functions, as a step or an optimizer, is not pickled, and says so in one sentence of its own."""

from collections.abc import Callable
from typing import Any


class Unpicklable:
    """Pickling raises one sentence, and a copy is the object itself, as of a function. A subclass says the sentence."""

    _cannot_be_pickled: str

    def __reduce__(self):
        raise ValueError(self._cannot_be_pickled)

    def __copy__(self, memo: Any = None):
        return self

    __deepcopy__ = __copy__


class UnpicklableFunction(Unpicklable):
    """A function within a function, with a sentence of its own where it is pickled."""

    def __init__(self, function: Callable, cannot_be_pickled: str):
        self._function, self._cannot_be_pickled = function, cannot_be_pickled
        self.__doc__, self.__wrapped__ = function.__doc__, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)
