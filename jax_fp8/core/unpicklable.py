"""Objects made of functions, such as a step or an optimizer, cannot be pickled: they raise an error that says why."""

from collections.abc import Callable
from typing import Any, NoReturn, Self


class Unpicklable:
    """Pickling raises the message of the subclass. A copy is the object itself, as a copy of a function is."""

    _cannot_be_pickled: str

    def __reduce__(self) -> NoReturn:
        raise ValueError(self._cannot_be_pickled)

    def __copy__(self, memo: object = None) -> Self:
        return self

    __deepcopy__ = __copy__


class UnpicklableFunction(Unpicklable):
    """A function that was made inside of a function, with a message for who pickles it."""

    def __init__(self, function: Callable, cannot_be_pickled: str):
        self._function, self._cannot_be_pickled = function, cannot_be_pickled
        self.__doc__, self.__wrapped__ = function.__doc__, function

    def __call__(self, *args: object, **options: object) -> Any:
        return self._function(*args, **options)
