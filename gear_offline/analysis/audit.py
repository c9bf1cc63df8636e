"""The passport of a dataset: what in it looks wrong, where, and what to do about it.

Shape legend: N steps, E episodes, T steps of an episode, S elements of an observation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gear_offline.core.text import count_text, printable
from gear_offline.core.types import Array, Float64Array, Int64Array
from gear_offline.dataset.dataset import Columns, Dataset, open_dataset
from gear_offline.dataset.scores import normalized_score
from gear_offline.dataset.shard import byte_view
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import describe, make_environment
from gear_offline.progress import Progress

__all__ = ["Audit", "Finding", "audit"]

COMPARED = ("observations", "actions", "rewards")  # what makes two episodes the same
SAMPLED_EPISODES = 300  # that say how far a step usually goes
FAR = 8.0  # times the mean step, in half of the elements, at least ...
FARTHER = 3.0  # ... and times the score that one step in a hundred exceeds
CLIPPED_SHARE = 0.05  # of steps that lie exactly on an element's extreme
OUTLIER = 50.0  # standard deviations from the mean
SAME_LENGTH = 5  # episodes that end as terminated at the greatest length
EXAMPLES = 5  # places that a finding names


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that looks wrong.

    Attributes
    ----------
    check
        ``boundary``, ``ending``, ``constant``, ``clipped``, ``bounds``, ``outlier``, ``nonfinite``,
        ``repeated`` or ``shared``.
    what, remedy
        A sentence each.
    count
        Steps, elements or episodes concerned.
    places
        The first of them: ``(episode, step)``, ``(episode,)`` or ``(element,)``.
    """

    check: str
    what: str
    remedy: str
    count: int
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What `audit` found.

    Attributes
    ----------
    path, environment
        Of the dataset.
    episodes, steps, terminated, truncated
        Counts.
    returns, lengths
        ``{"min", "q25", "median", "q75", "max", "mean"}`` over episodes.
    normalized_score
        D4RL's scale of the mean return; None without reference scores.
    findings
        What looks wrong, an empty tuple where nothing does.
    """

    path: str
    environment: str | None
    episodes: int
    steps: int
    terminated: int
    truncated: int
    returns: dict[str, float]
    lengths: dict[str, float]
    normalized_score: float | None
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document."""
        return asdict(self)

    def print(self) -> None:
        """Print the page."""
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False, markup=False)
        counts = f"{count_text(self.episodes, 'episode')}, {count_text(self.steps, 'step')}"
        console.print(f"{printable(self.path)}: {counts}; {self.environment or 'no environment'}")
        console.print(f"endings: {self.terminated:,} terminated, {self.truncated:,} truncated")
        for name, spread in (("return", self.returns), ("length", self.lengths)):
            values = ", ".join(f"{key} {value:,.4g}" for key, value in spread.items())
            console.print(f"{name}: {values}")
        if self.normalized_score is not None:
            console.print(f"normalized score of the mean return: {self.normalized_score:.1f}")
        if not self.findings:
            console.print("nothing looks wrong")
            return
        table = Table("check", "what looks wrong", "what to do", box=None, pad_edge=False)
        for finding in self.findings:
            places = ", ".join(":".join(map(str, place)) for place in finding.places)
            more = ", ..." if finding.count > len(finding.places) > 0 else ""
            where = f" ({places}{more})" if places else ""
            table.add_row(finding.check, printable(finding.what) + where, finding.remedy)
        console.print(table)


def audit(
    dataset: Dataset | str | Path,
    *,
    against: Sequence[Dataset | str | Path] = (),
    quiet: bool = True,
) -> Audit:
    """Look through a dataset for what is often wrong in one.

    Parameters
    ----------
    dataset
        Opened, or a directory.
    against
        Datasets with which episodes are compared: those that they share are told.
    quiet
        Show no progress.

    Returns
    -------
    Audit
        Facts and findings.  A missing episode boundary shows as a step that goes farther than the
        data's own steps do: in half of the elements of the observation at least 8 times the
        element's mean step, and at least 3 times what one step in a hundred does.  That finds
        boundaries which are missing here and there, not ones which are missing nearly everywhere.

    Raises
    ------
    InputError
        Those of `gear_offline.open_dataset`.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> page = go.audit("tiny", against=["tiny"])
    >>> page.findings[-1].check
    'shared'
    """
    data = dataset if isinstance(dataset, Dataset) else open_dataset(dataset, verify=False)
    others = [d if isinstance(d, Dataset) else open_dataset(d, verify=False) for d in against]
    reader = _Reader(data)
    total = sum(len(one) for one in [data, *others])
    with Progress(f"audit {data.path.name}", total=total, unit="episodes", quiet=quiet) as progress:
        for number, episode in enumerate(data.iter_episodes()):
            reader.read(number, episode)
            progress.advance(1)
        findings = [*reader.findings(), *_endings(data), *_bounds(data)]
        for other in others:
            names = [name for name in COMPARED if name in _names(data) and name in _names(other)]
            theirs = set()
            for episode in other.iter_episodes(columns=names):
                theirs.add(_digest(episode))
                progress.advance(1)
            findings += _found(
                "shared",
                [e for e, digest in enumerate(reader.digests) if digest in theirs],
                f"of {len(data):,} are in {other.path} too",
                "expected of medium-expert and medium; else evaluation data may have leaked",
            )
    returns, scores = data.returns[np.isfinite(data.returns)], data.reference_scores
    return Audit(
        path=str(data.path),
        environment=data.environment_id,
        episodes=len(data),
        steps=data.spec.steps,
        terminated=int(data.terminated.sum()),
        truncated=int(data.truncated.sum()),
        returns=_spread(returns),
        lengths=_spread(data.episodes.lengths),
        normalized_score=None
        if scores is None or not len(returns)
        else normalized_score(float(returns.mean()), scores),
        findings=tuple(findings),
    )


class _Reader:
    """Goes through the episodes once, and knows then what looks wrong in their steps."""

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self.digests: list[str] = []
        self._clipped: dict[str, Int64Array] = {}  # steps on an element's extreme
        self._floats = [name for name in _names(data) if _is_float(data, name)]
        self._outliers: dict[str, dict[int, tuple[int, int]]] = {}  # first place of each element
        self._steps: Float64Array | None = None  # (S,) mean size of a step
        self._limit = np.inf
        self._jumps: list[tuple[int, int]] = []
        if "observations" in _names(data) and _is_float(data, "observations"):
            self._measure()

    def _measure(self) -> None:
        """Learn from some episodes how far a step usually goes."""
        count = len(self._data)
        chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_EPISODES)).astype(int))
        moves = [_moves(e) for e in self._data.iter_episodes(chosen, columns=["observations"])]
        every = np.concatenate(moves)
        if len(every) and (every > 0).any():
            self._steps = every.mean(0)
            self._limit = max(FAR, FARTHER * float(np.quantile(self._scores(every), 0.99)))

    def _scores(self, moves: Float64Array) -> Float64Array:
        """Return (T - 1,): half of the elements go at least so many times their mean step."""
        assert self._steps is not None, "they are measured first"
        moving = self._steps > 0
        scores: Float64Array = np.median(moves[:, moving] / self._steps[moving], axis=1)
        return scores

    def read(self, number: int, episode: Columns) -> None:
        self.digests.append(_digest({n: episode[n] for n in COMPARED if n in episode}))
        if self._steps is not None:
            far = np.flatnonzero(self._scores(_moves(episode)) > self._limit)
            self._jumps += [(number, int(step) + 1) for step in far]
        if "actions" in episode and _is_float(self._data, "actions"):
            facts, rows = self._data.statistics["actions"], _flat(episode["actions"])
            on_edge = (rows == facts.min.reshape(-1)) | (rows == facts.max.reshape(-1))
            self._clipped["actions"] = self._clipped.get("actions", 0) + on_edge.sum(0)
        for name in self._floats:
            facts = self._data.statistics[name]
            mean, std = facts.mean.reshape(-1), facts.std.reshape(-1)
            far = (np.abs(_flat(episode[name]) - mean) > OUTLIER * std) & (std > 0)
            for element in np.flatnonzero(far.any(0)):
                place = (number, int(far[:, element].argmax()))
                self._outliers.setdefault(name, {}).setdefault(int(element), place)

    def findings(self) -> Iterator[Finding]:
        data = self._data
        yield from _found(
            "boundary",
            self._jumps,
            "inside episodes go farther than the data's own steps: an episode boundary may be "
            "missing before",
            "look at the source's flags, or convert with another --rule",
            noun="step",
        )
        for name, facts in data.statistics.items():
            if facts.nonfinite:
                yield Finding(
                    check="nonfinite",
                    what=f"{name} has {count_text(facts.nonfinite, 'value')} NaN or infinite",
                    remedy="leave these episodes out, or repair the source",
                    count=facts.nonfinite,
                )
            if name in COMPARED:
                yield from _found(
                    "constant",
                    np.flatnonzero(facts.std.reshape(-1) == 0),
                    f"of {name} never change",
                    "harmless for training; check the source if they should change",
                    noun="element",
                )
        for name, counts in self._clipped.items():
            shares = counts / data.spec.steps * (data.statistics[name].std.reshape(-1) > 0)
            yield from _found(
                "clipped",
                np.flatnonzero(shares > CLIPPED_SHARE),
                f"of {name} lie on their extreme in up to {shares.max():.0%} of the steps",
                "expected of clipped actions; a tanh head reaches its ends slowly",
                noun="element",
            )
        for name, first in self._outliers.items():
            yield from _found(
                "outlier",
                first.values(),
                f"of {name} reach more than {OUTLIER:g} standard deviations from their mean",
                "look at these steps: a simulation may have diverged",
                noun="element",
            )
        times = Counter(self.digests)
        yield from _found(
            "repeated",
            [e for e, digest in enumerate(self.digests) if times[digest] > 1],
            "are in the dataset more than once",
            "expected of joined datasets; else they weigh more than others",
        )


def _found(
    check: str, places: Iterable[Any], what: str, remedy: str, *, noun: str = "episode"
) -> Iterator[Finding]:
    """Yield what is wrong at `places`, numbers or tuples, if there are any."""
    every = [place if isinstance(place, tuple) else (int(place),) for place in places]
    if every:
        what, first = f"{count_text(len(every), noun)} {what}", tuple(every[:EXAMPLES])
        yield Finding(check=check, what=what, remedy=remedy, count=len(every), places=first)


def _endings(data: Dataset) -> Iterator[Finding]:
    lengths = data.episodes.lengths
    at_limit = np.flatnonzero((lengths == lengths.max()) & data.terminated)
    if at_limit.size >= SAME_LENGTH:
        what = f"of the greatest length, {lengths.max():,} steps, are said to have terminated: "
        remedy = "if so, the source's time limits are flagged as terminals"
        yield from _found("ending", at_limit, what + "that looks like a time limit", remedy)
    open_ends = np.flatnonzero(~(data.terminated | data.truncated))
    if open_ends.size > 1:  # the last one is often cut
        remedy = "harmless for the Decision Transformer; Q-learning must not take them as ends"
        yield from _found("ending", open_ends, "end without a flag", remedy)


def _bounds(data: Dataset) -> Iterator[Finding]:
    """Compare actions with the environment's bounds, where it can be made here."""
    if data.environment_id is None or "actions" not in _names(data):
        return
    try:
        with make_environment(data.environment_id) as environment:
            known = describe(environment, data.environment_id)
    except GearError:
        return
    facts = data.statistics["actions"]
    low, high = facts.min.reshape(-1), facts.max.reshape(-1)
    least, most = known.low, known.high
    if known.discrete:
        least, most = np.zeros(1, np.float32), np.full(1, known.choices - 1, np.float32)
    if not known.discrete and least.size != low.size:
        return
    beyond = np.flatnonzero((low < least - 1e-6) | (high > most + 1e-6))
    if beyond.size:
        reached = f"{low[beyond].min():.4g} to {high[beyond].max():.4g}"
        what = f"of actions reach {reached}; {data.environment_id} takes "
        what += f"{least.min():g} to {most.max():g}"
        remedy = "clip them at the source; the environment would"
        yield from _found("bounds", beyond, what, remedy, noun="element")


def _names(data: Dataset) -> list[str]:
    return [column.name for column in data.spec]


def _is_float(data: Dataset, name: str) -> bool:
    return data.spec[name].dtype.kind == "f"


def _flat(rows: Array) -> Array:
    return rows.reshape(len(rows), -1)


def _moves(episode: Columns) -> Float64Array:
    """Return (T - 1, S): how far each element goes in a step; steps with NaN go nowhere."""
    moves = np.abs(np.diff(_flat(episode["observations"]).astype(np.float64), axis=0))
    return np.nan_to_num(moves, nan=0.0, posinf=0.0)


def _digest(episode: Columns) -> str:
    """Return what equal episodes have in common: xxh3-128 over the columns' bytes."""
    state = xxhash.xxh3_128()
    for name in sorted(episode):
        state.update(byte_view(np.ascontiguousarray(episode[name])))
    return state.hexdigest()


def _spread(values: Array) -> dict[str, float]:
    if not len(values):
        return {}
    named = dict(zip(("min", "q25", "median", "q75", "max"), (0, 0.25, 0.5, 0.75, 1), strict=True))
    spread = {name: float(np.quantile(values, q)) for name, q in named.items()}
    return spread | {"mean": float(np.mean(values))}
