"""The scales of rewards: D4RL's reference scores, and edits of a dataset's rewards.

For each of D4RL's 147 datasets the table holds the return of a random policy (minimum) and of an
expert (maximum), and the path of its file on D4RL's server.  The returns are those of
``d4rl/infos.py`` (https://github.com/Farama-Foundation/D4RL).

Shape legend: n steps.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import resources
from pathlib import PurePosixPath

import numpy as np
from pydantic import FiniteFloat

from gear_offline.config.arguments import check_arguments
from gear_offline.core.types import Float64Array
from gear_offline.data.dataset.statistics import Model
from gear_offline.errors import InputError

TOLERANCE = 1e-6  # of the largest reward: float32 rounding
_SUFFIXES = r"\.(?:hdf5|h5|npz|parquet|arrow|feather|zarr|zarr\.zip)$"
_ENGINE_NOTE = "D4RL's simulator was another (mujoco-py, v2), so the score is indicative only"
_WALKER_NOTE = f"{_ENGINE_NOTE}; Walker2d-v5 moreover changed a foot's friction (1.9, not 0.9)"
_GYMNASIUM_FAMILIES = {
    "Hopper": "hopper-medium-v2",
    "HalfCheetah": "halfcheetah-medium-v2",
    "Walker2d": "walker2d-medium-v2",
    "Ant": "ant-medium-v2",
    "AdroitHandPen": "pen-human-v1",
    "AdroitHandDoor": "door-human-v1",
    "AdroitHandHammer": "hammer-human-v1",
    "AdroitHandRelocate": "relocate-human-v1",
    "FrankaKitchen": "kitchen-complete-v0",
}


class ReferenceScores(Model):
    """The returns that count as 0 and as 100."""

    name: str  # what was asked for
    minimum: FiniteFloat  # of a random policy
    maximum: FiniteFloat  # of an expert
    indicative: bool = False  # not in D4RL's own environment: never call it a D4RL score
    note: str = ""  # why it is indicative


@functools.cache
def _table() -> dict[str, tuple[float, float, str]]:
    """Return {dataset: (minimum, maximum, file on the server)}."""
    data = resources.files("gear_offline.data.dataset") / "data" / "d4rl_reference_scores.csv"
    with data.open(encoding="utf-8") as text:
        rows = [(float(r["ref_min"]), float(r["ref_max"]), r) for r in csv.DictReader(text)]
    return {row["env"]: (low, high, row["dataset_file"]) for low, high, row in rows}


@functools.cache
def _names() -> dict[str, str]:
    """Return {dataset, or stem of its file: dataset}."""
    files = {PurePosixPath(row[2]).stem: name for name, row in reversed(_table().items())}
    return files | {name: name for name in _table()}


def _pair(name: str) -> tuple[float, float] | None:
    """Return minimum and maximum of a dataset, or those that all datasets of a family share."""
    table = _table()
    versions = [dataset for dataset in table if dataset.rpartition("-v")[0] == name]
    family = versions or [dataset for dataset in table if dataset.startswith(f"{name}-")]
    pairs = {table[dataset][:2] for dataset in ([name] if name in table else family)}
    return pairs.pop() if len(pairs) == 1 else None


def dataset_names() -> list[str]:
    """Return the names of D4RL's datasets, in the order of its own table."""
    return list(_table())


def dataset_file(name: str) -> str | None:
    """Return the file of dataset `name` relative to D4RL's server, ``None`` when unknown."""
    row = _table().get(name)
    return row[2] if row else None


def dataset_of_file(name: str) -> str | None:
    """Return the dataset that a dataset name, file name or path stands for, or ``None``."""
    return _names().get(re.sub(_SUFFIXES, "", PurePosixPath(name).name))


def find_scores(name: str) -> ReferenceScores | None:
    """Return the reference scores of a dataset or an environment; None where none are known."""
    if pair := _pair(name):
        return ReferenceScores(name=name, minimum=pair[0], maximum=pair[1])
    family, _, version = name.rpartition("-v")
    if family not in _GYMNASIUM_FAMILIES or not version.isdecimal():
        return None
    minimum, maximum, _ = _table()[_GYMNASIUM_FAMILIES[family]]
    note = _WALKER_NOTE if name == "Walker2d-v5" else _ENGINE_NOTE
    return ReferenceScores(name=name, minimum=minimum, maximum=maximum, indicative=True, note=note)


@check_arguments()
def reference_scores(name: str) -> ReferenceScores | None:
    """Look up the reference scores of a dataset or an environment.

    Parameters
    ----------
    name
        A D4RL dataset (``"hopper-medium-v2"``), an environment of D4RL whose datasets share one
        pair (``"hopper"``, ``"maze2d-umaze-dense"``), or a Gymnasium id (``"Hopper-v5"``), which
        gives indicative scores.

    Returns
    -------
    ReferenceScores or None
        ``None`` for a Gymnasium id (``"Pendulum-v1"``) for which D4RL has no scores.

    Raises
    ------
    InputError
        ``USAGE`` for any other name without scores.
    """
    scores = find_scores(name)
    is_id = re.fullmatch(r".+-v\d+", name) is not None
    if scores is None and (not is_id or _similar(name)):
        raise _no_scores(name)
    return scores


@check_arguments()
def normalized_score(value: float, refs: ReferenceScores | str) -> float:
    """Return 100 (value - minimum) / (maximum - minimum): 0 is random, 100 is an expert.

    Parameters
    ----------
    value
        Return of an episode, or a mean.
    refs
        Reference scores, or a name that has them, e.g. ``"hopper-medium-v2"``.

    Raises
    ------
    InputError
        ``USAGE`` for a name without scores, and for arguments in d4rl's order.

    Examples
    --------
    >>> import gear_offline as go
    >>> scores = go.reference_scores("hopper-medium-v2")
    >>> round(scores.minimum, 1), round(scores.maximum, 1)
    (-20.3, 3234.3)
    >>> round(go.normalized_score(1500.0, "hopper-medium-v2"), 2)
    46.71
    """
    if isinstance(value, str):
        raise InputError("USAGE", "a name is given as the return", remedy="give the return first")
    scores = known_scores(refs) if isinstance(refs, str) else refs
    return 100.0 * (value - scores.minimum) / (scores.maximum - scores.minimum)


def known_scores(name: str) -> ReferenceScores:
    """Return the reference scores under a name that a user gave (``USAGE``)."""
    scores = find_scores(name)
    if scores is None:
        raise _no_scores(name)
    return scores


def _similar(name: str) -> list[str]:
    """Return the name with scores that was probably meant, if any."""
    families = {dataset.partition("-")[0] for dataset in _table()}
    return get_close_matches(name, [*filter(_pair, sorted(families)), *_table()], 1, 0.8)


def _no_scores(name: str) -> InputError:
    remedy = "use a D4RL dataset name such as hopper-medium-v2"
    remedy = f"did you mean {similar[0]!r}?" if (similar := _similar(name)) else remedy
    return InputError("USAGE", f"no reference scores under the name {name!r}", remedy=remedy)


# edits: what lies between the rewards of a dataset and those of its environment ---------------


class RewardEdit(Model):
    """A reward of the data is ``clip(scale * r + shift, low, high)`` of the environment's r.

    It need not hold at an episode's last step, after which nothing is asked.
    """

    scale: FiniteFloat = 1.0
    shift: FiniteFloat = 0.0
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None

    def apply(self, rewards: Float64Array) -> Float64Array:
        """Edit (n,) rewards of the environment."""
        edited = self.scale * rewards + self.shift  # a tensor, of a tensor
        is_clipped = self.low is not None or self.high is not None
        return edited.clip(self.low, self.high) if is_clipped else edited  # type: ignore[arg-type]

    def explains(self, before: Float64Array, after: Float64Array) -> bool:
        """Compare (n,) rewards `after` with the edited ones `before`."""
        most = float(np.abs(after).max(initial=1e-30))
        return bool(np.allclose(self.apply(before), after, rtol=0.0, atol=TOLERANCE * most))


def candidates(before: Float64Array, after: Float64Array) -> Iterator[RewardEdit]:
    """Yield the edits that may have made (n,) rewards `after` of those `before`."""
    low, high = (float(end(after)) for end in (np.min, np.max)) if after.size else (0.0, 0.0)
    lines = [(1.0, 0.0)]
    for rows in (slice(None), (after > low) & (after < high)):
        x, y = before[rows], after[rows]
        if x.size:
            first, last = x.argmin(), x.argmax()
            run = x[last] - x[first]
            scale = float(f"{(y[last] - y[first]) / run if run else 0.0:.6g}")
            lines.append((scale, float(f"{y[last] - scale * x[last]:.6g}")))
    for ends in ({}, {"low": low, "high": high}):
        yield from (RewardEdit(scale=scale, shift=shift, **ends) for scale, shift in lines)


def find_edit(blocks: Iterable[tuple[Float64Array, Float64Array]]) -> RewardEdit | None:
    """Find the edit of the second rewards of each block; None where no step tells it.

    It is guessed from the first block, and has to hold in all.
    """
    possible: list[RewardEdit] | None = None
    for before, after in blocks:
        guesses = candidates(before, after) if possible is None else possible
        possible = [edit for edit in guesses if edit.explains(before, after)]
    return next(iter(possible or []), None)
