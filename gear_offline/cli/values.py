"""Parts that commands share: arguments, options of several words or numbers, help examples.

Examples are lines of at most 76 columns, so that they can be copied.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from glob import escape, glob
from typing import Annotated, Any

from typer import Argument, BadParameter, Option
from typer.core import TyperCommand

from gear_offline.errors import InputError


class Command(TyperCommand):
    """A command that refuses an option of one value twice: the first one would not count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        order: list[Any] = self.make_parser(ctx).parse_args([*args])[2]
        valued = [p for p in order if p.param_type_name == "option" and not p.is_flag]
        for option in (p for p in valued if valued.count(p) > 1 and not p.multiple):
            is_list = "," in (option.metavar or "")
            remedy = "join its parts by commas" if is_list else "keep one of them"
            raise InputError("USAGE", f"{max(option.opts, key=len)} is given twice", "", remedy)
        return super().parse_args(ctx, args)


def parse_size(text: str) -> int:
    """Return the bytes of ``"256MiB"``, ``"2GB"`` or ``"1048576"``."""
    from gear_offline.config.strict_yaml import byte_count  # slow to load

    with suppress(ValueError):
        if 0 < (size := int(byte_count(text))) < 1 << 62:
            return size
    raise BadParameter(f"{text!r} is not a size; write it like 256MiB, 2GB or 1048576")


def parse_count(text: str) -> int:
    """Return the whole number from 1 on of ``"100000"``, ``"1e5"`` or ``"100_000"``."""
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not (count.is_integer() and 1 <= count < 1 << 53):
        problem = f"{text[:40]!r} is not a whole number from 1 on"
        raise BadParameter(f"{problem}; write it like 100000, 1e5 or 100_000")
    return int(count)


def parse_range(text: str) -> tuple[int, int]:
    """Return the first and the last number of ``"4100..4160"``; ``"4100"`` is one."""
    first, _, last = text.partition("..")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise BadParameter(f"{text[:40]!r} is not a range; write it like 4100..4160")
    return int(first), int(last or first)


def parse_list(text: str) -> list[str]:
    """Return the parts of a comma-separated list, at least one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise BadParameter(f"{text!r} names nothing")
    return words


def parse_pairs(text: str) -> dict[str, str]:
    """Return the pairs of ``"act=actions,obs=observations"``."""
    words = [word.rpartition("=") for word in parse_list(text)]
    pairs = {before.strip(): after.strip() for before, _, after in words}
    if len(pairs) < len(words) or not all(map(all, pairs.items())):
        raise BadParameter(f"{text!r} does not give names once each, as in a=b,c=d")
    return pairs


def parse_options(text: str) -> dict[str, Any]:
    """Return the values of ``"g=1.0,size=[3, 4]"`` by their names."""
    from gear_offline.config.strict_yaml import parse_yaml  # slow to load

    inner = text.strip()
    inner = inner[1:-1] if inner[:1] + inner[-1:] == "{}" else inner  # as in a recipe
    pairs = re.sub(r"(^|,)\s*([\w./-]+)\s*=", r"\1 \2: ", inner)
    return dict(parse_yaml(f"{{{pairs}}}", where=text))


def parse_numbers(text: str) -> list[float]:
    """Return the numbers of ``"3600,1800"``."""
    try:
        return [float(word) for word in parse_list(text)]
    except ValueError:
        raise BadParameter(f"{text!r} is not a list of numbers such as 3600,1800") from None


def parse_device(text: str) -> str:
    """Return the name of a device, of which torch may still have none."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", text):
        raise BadParameter(f"{text!r} is no device; write auto, cpu, cuda or cuda:1")
    return text


# completion: called at each press of TAB, so nothing here loads torch


def complete_recipe(incomplete: str) -> list[str]:
    """Return names of recipes, recipe files and runs that begin so."""
    from gear_offline.config.files import recipe_paths

    names = [name for name in recipe_paths() if name.startswith(incomplete)]
    return [*names, *sorted(glob(f"{escape(incomplete)}*.yaml")), *complete_run(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return run directories that begin so, also those one folder further down."""
    below = ("*/recipe.yaml", "*/*/recipe.yaml")
    recipes = [path for end in below for path in glob(escape(incomplete) + end)]
    return sorted(os.path.dirname(path) for path in recipes)


def complete_option(incomplete: str) -> list[str]:
    """Return the options of recipes that begin so, with their ``=``."""
    from gear_offline.config.problems import dotted_fields
    from gear_offline.config.recipe import Recipe

    return [f"{name}=" for name in dotted_fields(Recipe) if f"{name}=".startswith(incomplete)]


Run = partial(Argument, metavar="RUN", autocompletion=complete_run)
RecipeName = Annotated[
    str,
    Argument(
        metavar="RECIPE",
        autocompletion=complete_recipe,
        help="Name of a recipe, a YAML file or a run directory.",
    ),
]
Changes = partial(Argument, [], metavar="KEY=VALUE", autocompletion=complete_option)
Overrides = partial(Changes, help="Options to change, e.g. train.steps=1000.")
Axes = partial(Changes, help="Options to change; key=a,b,c: every combination is a run.")
Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[
    bool, Option("--quiet", "-q", help="No progress; only warnings that no result keeps.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing target.")]
Ray = Annotated[
    str | None,
    Option(metavar="ADDRESS", help="Work on a Ray cluster: auto, or HOST:PORT of its head."),
]
Environment = partial(Option, None, "--environment", "--env")
Model = Annotated[
    str | None,
    Option(metavar="FILE.py:NAME", help="A model of one's own whose file is new here or changed."),
]
How = partial(
    Option,
    None,
    "--environment-options",
    parser=parse_options,
    metavar="KEY=VALUE,...",
    help="What gymnasium.make takes besides: g=1.0,max_episode_steps=40.",
)
Size = partial(Option, parser=parse_size, metavar="SIZE")
Count = partial(Option, parser=parse_count, metavar="COUNT")
Names = partial(Option, parser=parse_list, metavar="A,B,...")
Pairs = partial(Option, parser=parse_pairs, metavar="OLD=NEW,...")
Shift = partial(Option, parser=parse_options, metavar="COLUMN=ROWS,...")
Device = partial(Option, parser=parse_device, metavar="DEVICE")
Numbers = partial(Option, parser=parse_numbers, metavar="X,Y,...")


def examples(*commands: str) -> str:
    """Return the last part of a command's help."""
    return "\n".join(["[bold]Examples[/]", *(f"  gear-offline {command}" for command in commands)])


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a command's ``locals()`` as arguments of its function, which prints no JSON."""
    return {name: value for name, value in arguments.items() if name != "as_json"}


def show(
    document: Any, as_json: bool = False, print_text: Callable[[], object] | None = None
) -> None:
    """Print a result as a JSON document or as text."""
    with _stdout_to(_results[-1]):
        if as_json:
            print(json.dumps(document, indent=2, allow_nan=False))
        elif print_text is None:
            print(document)
        else:
            print_text()


_results = [1]  # the handle that `show` prints to is the last one


def alone_on_stdout(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints by `show` alone: what others print goes to stderr."""

    @wraps(command)
    def run(*words: Any, **options: Any) -> None:
        with _stdout_to(2) as before:
            _results.append(before)
            try:
                command(*words, **options)
            finally:
                _results.pop()

    return run


@contextmanager
def _stdout_to(handle: int) -> Iterator[int]:
    """Send to another handle what Python and C libraries print; yield the one before."""

    def turn(to: int) -> None:
        print(end="", flush=True)
        ctypes.CDLL(None).fflush(None)
        os.dup2(to, 1)

    before = os.dup(1)
    turn(handle)
    try:
        yield before
    finally:
        turn(before)
        os.close(before)
