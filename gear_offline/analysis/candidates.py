"""The strategies that are compared: the recipe's own one first, then those that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.analysis.sampling import Strategy
from gear_offline.config.recipe import Recipe
from gear_offline.config.strict_yaml import MAX_BYTES, parse_yaml
from gear_offline.core.files import read_regular
from gear_offline.errors import InputError
from gear_offline.sampling import parse_options, parse_strategy

DEFAULT = (
    *("uniform_steps", "uniform_episodes", "return_weighted", "top_percent"),
    *("stratified_return", "shuffled_epochs", "min_dt", "d3rlpy"),
)
MOST_LABEL = 80
FORM = "a list of names or of mappings such as {strategy: top_k, k: 50}; a mapping may have a label"


def parse_candidates(asked: str | Sequence[Any] | None, recipe: Recipe) -> list[Strategy]:
    """Return what to compare: the recipe's own strategy first, then those named or the usual.

    Parameters
    ----------
    asked
        ``"uniform_steps,top_k:k=50,return_weighted:rule=rank:temperature=2"``, the name of a YAML
        file, or a list as in that file: such names, or mappings with ``strategy``, its options and,
        if wanted, a ``label``.
    """
    where, items = "--strategies", DEFAULT if asked is None else asked
    if isinstance(items, str) and items.strip().endswith((".yaml", ".yml")):
        where = items.strip()
        items = _read(Path(where))
    elif isinstance(items, str):
        items = [part for part in items.split(",") if part.strip()]
    if not items:
        raise _unusable("no strategy is named", where, "leave it out for the usual ones")
    own = {"strategy": recipe.selection.strategy, **recipe.selection.options}
    found: dict[str, Strategy] = {}
    for item in (own, *items):
        one, has_label = _strategy(item, where)
        key = f"{one.strategy} {sorted(one.options.items())}"
        if key not in found or has_label:
            found[key] = one  # the recipe's own one too, by the label that it is given
    labels = [one.label for one in found.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        remedy = "give each a label of its own: - {label: ..., strategy: ...}"
        raise _unusable(f"two strategies are called {twice[0]!r}", where, remedy)
    return list(found.values())


def _strategy(item: Any, where: str) -> tuple[Strategy, bool]:
    """Return a strategy as tables call it, and whether it has a label of its own."""
    if isinstance(item, str):
        name, options = parse_strategy(item)
    elif isinstance(item, Mapping) and isinstance(item.get("strategy"), str):
        name = item["strategy"]
        options = {key: value for key, value in item.items() if key not in ("strategy", "label")}
    else:
        what = f"{str(item)[:60]!r} is neither a name nor a mapping with a strategy"
        raise _unusable(what, where, f"write {FORM}")
    texts = [f"{key}={value}" for key, value in options.items()]
    label = " ".join([name, *(text if len(text) <= 24 else f"{text[:21]}..." for text in texts)])
    has_label = isinstance(item, Mapping) and "label" in item
    if has_label:
        label = item["label"]
        if not (isinstance(label, str) and 0 < len(label.strip()) <= MOST_LABEL):
            what = f"a label is not a text of 1 to {MOST_LABEL} characters"
            raise _unusable(what, where, f"write {FORM}")
    parse_options(name, options)
    return Strategy(label=label.strip(), strategy=name, options=dict(options)), has_label


def _read(path: Path) -> list[Any]:
    try:
        text = read_regular(path, most=MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _unusable(f"cannot be read: {reason}", str(path), f"give {FORM}") from error
    content = parse_yaml(text, where=str(path))
    if not isinstance(content, list):
        raise _unusable("not a list of strategies", str(path), f"write {FORM}")
    return content


def _unusable(what: str, where: str, remedy: str) -> InputError:
    return InputError("USAGE", what, where, remedy)
