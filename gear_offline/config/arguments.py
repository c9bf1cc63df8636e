"""Keyword arguments that a public function lacks: each is refused with a guess."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from gear_offline.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def check_arguments(
    recipe_option: Callable[[str], str | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: an unknown keyword argument is one error (``USAGE``).

    `recipe_option` guesses the option of a recipe that was meant, for functions that take them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(signature(function).parameters)

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in names:
                    raise _no_argument(function.__qualname__, name, names, recipe_option)
            return function(*arguments, **options)

        return call

    return decorate


def _no_argument(
    function: str, name: str, names: list[str], recipe_option: Callable[[str], str | None] | None
) -> InputError:
    from gear_offline.config.problems import ALIASES, nearest  # slow to load

    function = function.removesuffix(".__init__")
    alias = ALIASES.get(name, name).rpartition(".")[2]
    if guess := alias if alias in names else nearest(name, names):
        remedy = f"did you mean {guess!r}?"
    elif recipe_option is not None and (option := recipe_option(name)):
        remedy = f"options of a recipe go into a dict: go.{function}(recipe, {{{option!r}: ...}})"
    else:
        remedy = f"it takes {', '.join(each for each in names if each != 'self')}"
    return InputError("USAGE", f"{function}() has no argument {name!r}", remedy=remedy)
