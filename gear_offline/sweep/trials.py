"""The trials of a sweep, one recipe each, and its directory, with an ordinary run for each of them.

::

    runs/hopper-medium-sweep/
      sweep.json           the trials of the last call, the failed ones, the table
      runs/NAME/           a run directory of each trial, of earlier calls too
      sweep.md, plots/     the report
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.strict_yaml import dump_yaml, parse_value, parse_yaml, whole_number
from gear_offline.core.files import LOCK, HeldDirectory, check_folder, read_regular, write_file
from gear_offline.core.parts import is_part
from gear_offline.core.text import first_line, to_plain
from gear_offline.errors import InputError, given_path

MOST_TRIALS = 10_000
NAME_CHARACTERS = 80
MOST_BYTES = 1 << 30  # of sweep.json
Seeds = str | float | Sequence[int]
_SPAN = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")  # as of `blame`
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


class Trial(BaseModel, frozen=True):
    """One run of a sweep."""

    name: str  # of its run directory
    label: str  # what it is among the others, the same for all seeds
    settings: dict[str, Any]  # dotted option and value of what trials differ in, but the seed
    recipe: Recipe


def make_trials(
    recipe: Recipe | str | os.PathLike[str],
    options: Mapping[str, Sequence[Any]],
    seeds: Seeds | None = None,
    *,
    naming: Sequence[str] = (),
) -> list[Trial]:
    """Return the trials of a grid: the product of all options' values, and of the seeds.

    Options with several values name the trials; those in `naming` do so with one value, too.
    """
    axes = {key: list(values) for key, values in options.items()}
    if seeds is not None:
        if "seed" in axes:
            raise _usage_error("seeds are given twice, by --seeds and by seed=", "keep one of them")
        axes["seed"] = parse_seeds(seeds)
    count = 1
    for key, values in axes.items():
        if not values or any(value in values[:index] for index, value in enumerate(values)):
            problem = "has a value twice" if values else "has no values"
            raise _usage_error(f"{key} {problem}", "name each value once")
        count *= len(values)
    if count > MOST_TRIALS:
        raise _usage_error(f"{count:,} trials", f"one sweep has at most {MOST_TRIALS:,}")
    several = [key for key, values in axes.items() if len(values) > 1]
    names = list(dict.fromkeys([*naming, *(key for key in several if key != "seed")]))
    trials = []
    for combination in itertools.product(*axes.values()):
        changes = dict(zip(axes, combination, strict=True))
        trial_recipe = load_recipe(recipe, changes)
        if trial_recipe.data.admit_every is not None:
            raise _usage_error("several runs cannot grow one dataset", "train them one by one")
        dotted = flat(trial_recipe.to_dict())
        settings = {key: dotted.get(key, changes.get(key)) for key in names}  # short forms as given
        label = settings_label(settings)
        name, label = trial_name(label, trial_recipe.seed), label or trial_recipe.name
        trials.append(Trial(name=name, label=label, recipe=trial_recipe, settings=settings))
    labels = settings_labels([trial.settings for trial in trials])
    return [
        trial.model_copy(update={"label": label or trial.label})
        for trial, label in zip(trials, labels, strict=True)
    ]


def trial_name(label: str, seed: int) -> str:
    """Return the name of a run's directory; where a label cannot be one, it ends with a digest."""
    text = label.replace(", ", ",").replace(" ", "-")
    safe = _UNSAFE.sub("_", text).lstrip("._=,+-")
    if safe != label.replace(", ", ",") or len(safe) > NAME_CHARACTERS:
        safe = f"{safe[: NAME_CHARACTERS - 9].rstrip('_')}-{sha256(label.encode()).hexdigest()[:8]}"
    return f"{safe},s{seed}" if label else f"s{seed}"


def parse_options(overrides: Sequence[str]) -> dict[str, list[Any]]:
    """Return the options of ``key=a,b,c``, each with its values.

    Commas within brackets, braces or quotes belong to a value.
    """
    options: dict[str, list[Any]] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            problem = f"{override!r} is not an override"
            raise _usage_error(problem, "write key=value or key=a,b,c, e.g. model.layers=3,4")
        if key in options:
            raise _usage_error(f"{key} is given twice", "write its values as one list: key=a,b,c")
        where = f"override {key}"
        is_one = "," not in text
        options[key] = [parse_value(key, text)] if is_one else parse_yaml(f"[{text}]", where=where)
    return options


def parse_seeds(seeds: Seeds, first: int = 0) -> list[Any]:
    """Return the seeds of a number of them (8, from `first` on) or of a list: ``"3,5,8..10"``."""
    value = whole_number(to_plain(seeds))
    if isinstance(value, str) and not value.strip().isdecimal():
        spans = [_SPAN.fullmatch(item.strip()) for item in value.split(",") if item.strip()]
        ranges = [range(int(span[1]), int(span[2] or span[1]) + 1) for span in spans if span]
        if len(ranges) < len(spans) or not any(ranges) or sum(map(len, ranges)) > MOST_TRIALS:
            problem = f"--seeds {value[:40]!r} names no seeds, or more than {MOST_TRIALS:,}"
            raise _usage_error(problem, "write it like 8, or like 3,5,8..10")
        return [*itertools.chain.from_iterable(ranges)]
    if isinstance(value, str | int):
        if not 1 <= int(value) <= MOST_TRIALS:
            remedy = "a single seed is written with a comma: 12345,"
            raise _usage_error(f"--seeds {value} is not a number from 1 to {MOST_TRIALS:,}", remedy)
        return list(range(first, first + int(value)))
    return [value] if isinstance(value, float) else list(value)  # no seed, as is told


def settings_label(settings: Mapping[str, Any]) -> str:
    """Return dotted options and their values in short, e.g. ``"layers=3, learning_rate=0.001"``."""
    ends = [key.rpartition(".")[2] for key in settings]
    pairs = zip(settings, ends, strict=True)
    names = [end if ends.count(end) == 1 else key for key, end in pairs]
    return ", ".join(
        f"{name}={_text(value)}" for name, value in zip(names, settings.values(), strict=True)
    )


def settings_labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label of each setting; files stand there without their folders, if that is clear."""
    full = [settings_label(each) for each in settings]
    bare = [settings_label({key: _bare(item) for key, item in each.items()}) for each in settings]
    return bare if len(set(bare)) == len(set(full)) else full


def _bare(value: Any) -> Any:
    file = value.rpartition(":")[0] if is_part(value) else ""
    return value.rpartition(os.sep)[2] if file.endswith(".py") else value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return dump_yaml(value).strip().removesuffix("...").strip()


def _usage_error(problem: str, remedy: str) -> InputError:
    return InputError("USAGE", problem, remedy=remedy)


class SweepFile(BaseModel):
    """The content of ``sweep.json``, written at the begin, after training and with the table."""

    format: Literal[2] = 2
    recipe: str
    threads: int | None = None  # of a trial in a process of its own: other numbers round otherwise
    trials: list[Trial] = Field(min_length=1)
    failures: dict[str, str] = {}  # "CODE: what was wrong" by trial
    table: dict[str, Any] | None = None


class SweepDirectory:
    """The directory of a sweep, to look at; `hold` it to write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = given_path(path, "RUN_NOT_FOUND", where="path")
        self.json_path = self.path / "sweep.json"

    def run_path(self, trial: Trial) -> Path:
        return self.path / "runs" / trial.name

    @property
    def is_begun(self) -> bool:
        return os.path.lexists(self.json_path)

    def hold(self) -> HeldDirectory:
        """Keep other processes from running this sweep; a context manager."""
        problem, remedy = "another process is running this sweep", "wait for it, or choose another"
        error = InputError("RUN_LOCKED", problem, str(self.path), f"{remedy} directory with --out")
        return HeldDirectory(self.path, in_use=error)

    def check(self) -> None:
        """Refuse a place that is no folder, or holds something else."""
        check_folder(self.path, output=self.path)
        if self.path.is_dir() and not self.is_begun:
            foreign = {entry.name for entry in self.path.iterdir()} - {LOCK, ".sweep.json.partial"}
            if foreign:
                problem = "the directory is not empty and holds no sweep"
                raise InputError(
                    "OUTPUT_EXISTS", problem, str(self.path), "choose another with --out"
                )

    def read(self) -> SweepFile:
        """Return the content of ``sweep.json``."""
        if not self.is_begun:
            raise InputError("RUN_NOT_FOUND", "there is no sweep", str(self.path))
        try:
            content = read_regular(self.json_path, most=MOST_BYTES)
            return SweepFile.model_validate_json(content)
        except (OSError, ValueError) as error:
            problem = f"sweep.json cannot be read: {first_line(error)[:200]}"
            remedy = "sweep into another directory with --out"
            raise InputError("RUN_DAMAGED", problem, str(self.path), remedy) from error

    def file_for(self, trials: Sequence[Trial]) -> SweepFile:
        """Return the content for a call with `trials`; what rounds numbers is as of the first."""
        before: dict[str, Any] = {}
        if self.is_begun:
            before = self.read().model_dump(include={"threads"})
        return SweepFile(recipe=trials[0].recipe.name, trials=list(trials), **before)

    def write(self, file: SweepFile) -> None:
        """Write ``sweep.json``, with all recipes."""
        write_file(self.json_path, f"{file.model_dump_json(indent=1)}\n".encode())
