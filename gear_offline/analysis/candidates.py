"""The strategies that are compared: the recipe's own one first, then those that were asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import SelectionSettings
from gear_offline.config.strict_yaml import MAX_BYTES, parse_yaml
from gear_offline.errors import InputError
from gear_offline.sampling import parse_options

DEFAULT = (
    *("uniform_steps", "uniform_episodes", "return_weighted", "top_percent"),
    *("stratified_return", "shuffled_epochs", "min_dt", "d3rlpy"),
)
NAME_LENGTH = 60  # of a run's directory, before the seed
FORM = "a list of names or of mappings such as {strategy: top_k, k: 50}; a mapping may have a label"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with options, and what to call it."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None

    @property
    def label(self) -> str:
        """What tables call it: its title, or its name and options."""
        if self.title is not None:
            return self.title
        shown = [f"{key}={value}" for key, value in self.options.items()]
        short = [text if len(text) <= 24 else f"{text[:21]}..." for text in shown]
        return " ".join([self.strategy, *short])

    @property
    def settings(self) -> SelectionSettings:
        """The section of a recipe that says the same."""
        return SelectionSettings(strategy=self.strategy, options=dict(self.options))

    @property
    def slug(self) -> str:
        """The label as a file name; long or odd ones end with a digest of the options."""
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", self.label.replace(" ", "-")).strip("-.=")
        if plain == self.label.replace(" ", "-") and len(plain) <= NAME_LENGTH:
            return plain
        said = repr((self.label, self.strategy, sorted(self.options.items())))
        return f"{plain[:NAME_LENGTH]}-{sha256(said.encode()).hexdigest()[:8]}"

    def same_law(self, other: Candidate) -> bool:
        """Whether both draw alike, whatever they are called."""
        return (self.strategy, self.options) == (other.strategy, other.options)


def parse_candidates(text: str | None, recipe: Recipe) -> list[Candidate]:
    """Return what to compare: the recipe's own strategy first, then those named or the usual.

    Parameters
    ----------
    text
        ``"uniform_steps,top_k:k=50,return_weighted:rule=rank:temperature=2"``, or the name of a
        YAML file: a list whose items are such names or mappings with ``strategy``, its options
        and, if wanted, a ``label``.

    Raises
    ------
    InputError
        ``SELECTION``, ``USAGE``, ``STRATEGIES_FILE``,
        ``RECIPE_SYNTAX``.
    """
    own = Candidate(strategy=recipe.selection.strategy, options=recipe.selection.options)
    if text is not None and text.strip().endswith((".yaml", ".yml")):
        named = _read(Path(text.strip()))
    else:
        parts = DEFAULT if text is None else text.split(",")
        named = [_parse(part) for part in parts if part.strip()]
    if not named:
        raise InputError(
            "USAGE", "--strategies names no strategy", remedy="leave it out for the usual ones"
        )
    found: list[Candidate] = [own]
    for candidate in named:
        same = [i for i, c in enumerate(found) if candidate.same_law(c)]
        if not same:
            found.append(candidate)
        elif candidate.title is not None:
            found[same[0]] = candidate  # the recipe's own one, by the name it is given
    for candidate in found:
        parse_options(candidate.strategy, candidate.options)
    _check_labels(found, text)
    return found


def _check_labels(found: Sequence[Candidate], where: str | None) -> None:
    labels = [candidate.label for candidate in found]
    slugs = [candidate.slug for candidate in found]
    for label, slug in zip(labels, slugs, strict=True):
        if labels.count(label) > 1 or slugs.count(slug) > 1:
            raise InputError(
                "STRATEGIES_FILE",
                f"two strategies are called {label!r}"
                if labels.count(label) > 1
                else f"the runs of two strategies would be called {slug!r}",
                where=where or "",
                remedy="give each a label of its own: - {label: ..., strategy: ...}",
            )


def _parse(text: str) -> Candidate:
    name, *options = text.strip().split(":")
    pairs = [option.partition("=") for option in options]
    once = len({key for key, _, _ in pairs}) == len(pairs)
    if not (once and all(key and equals for key, equals, _ in pairs)):
        raise InputError(
            "USAGE",
            f"{text.strip()!r} is not a strategy with options",
            remedy="write it like top_k:k=50 or return_weighted:rule=rank:temperature=2",
        )
    values = {key: parse_yaml(value, where=f"option {key}") for key, _, value in pairs}
    return Candidate(strategy=name, options=values)


def _read(path: Path) -> list[Candidate]:
    """Return the candidates of a YAML file."""
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_yaml(file.read(MAX_BYTES + 1), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(
            "STRATEGIES_FILE", f"cannot be read: {reason}", where=str(path), remedy=f"give {FORM}"
        ) from error
    if not isinstance(content, list) or not content:
        raise _misformed("not a list of strategies", str(path))
    return [_item(item, f"{path} item {number}") for number, item in enumerate(content, start=1)]


def _item(item: Any, where: str) -> Candidate:
    if isinstance(item, str):
        return _parse(item)
    if not isinstance(item, dict) or not isinstance(item.get("strategy"), str):
        raise _misformed("neither a name nor a mapping with a strategy", where)
    label = item.get("label")
    if label is not None and not (isinstance(label, str) and 0 < len(label.strip()) <= 80):
        raise _misformed("the label is not a text of 1 to 80 characters", where)
    options = {key: value for key, value in item.items() if key not in ("strategy", "label")}
    return Candidate(
        strategy=item["strategy"], options=options, title=label.strip() if label else None
    )


def _misformed(what: str, where: str) -> InputError:
    return InputError("STRATEGIES_FILE", what, where=where, remedy=f"write {FORM}")
