"""Find suspicious data, with places and remedies; `inspect` describes the rest.

Flags, lengths, returns and statistics are those of all episodes.  Of large data a part of the rows
is read, in runs of steps that are spread evenly.

Shape legend: N steps, E episodes, T steps of an episode, S elements of an observation.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from gear_offline.config.arguments import check_arguments
from gear_offline.core.progress import Progress, Terminal
from gear_offline.core.remote import map_in_threads
from gear_offline.core.system import usable_cores
from gear_offline.core.text import Document, count_text
from gear_offline.core.types import Array, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import Dataset, open_to_read, view_episodes
from gear_offline.data.dataset.schema import REWARDS
from gear_offline.data.dataset.split import digest_episodes
from gear_offline.data.sources.plausible import odd_episodes
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import probe

COMPARED = ("observations", "actions", "rewards")  # what makes two episodes the same
PIECE_BYTES = 4 << 20  # that a thread reads at a time
MOST_BYTES, RUNS = 1 << 30, 256  # of rows that are looked at without `full`, in runs of steps
COMPARED_BYTES = 1 << 28  # of episodes that are compared: they lie here and there
SAMPLED_PARTS, SAMPLED_STEPS = 300, 1000  # parts of episodes that say how far a step usually goes
SAMPLED_BYTES = 64 << 20  # of them, as float64
FAR = 8.0  # times the mean step, in half of the elements, at least ...
FARTHER = 3.0  # ... and times the score that one step in a hundred exceeds
CLIPPED_SHARE = 0.05  # of steps that lie exactly on an element's extreme
OUTLIER = 50.0  # standard deviations from the mean
EXAMPLES = 5  # places that a finding names
CHECKS = {  # what is counted, and what to do
    "boundary": ("step", "look at the source's flags, or convert with another --rule"),
    "clipped": ("element", "expected of clipped actions; a tanh head reaches its ends slowly"),
    "outlier": ("element", "look at these steps: a simulation may have diverged"),
    "repeated": ("episode", "expected of joined datasets; else they weigh more than others"),
    "nonfinite": ("value", "leave these episodes out, or repair the source"),
    "constant": ("element", "harmless for training; check the source if they should change"),
    "ending": ("episode", "harmless for the Decision Transformer; Q-learning needs true flags"),
    "bounds": ("element", "clip them at the source; the environment would"),
    "shared": ("episode", "expected of medium-expert; else evaluation data may have leaked"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that looks wrong."""

    check: str  # one of `CHECKS`
    what: str  # a sentence
    remedy: str  # another one
    count: int  # steps, elements, episodes or values concerned
    places: tuple[tuple[int, ...], ...] = ()  # the first: (episode, step), (episode,) or (element,)


@dataclass(frozen=True, kw_only=True)
class Audit(Document):
    """The findings of `audit`."""

    path: str
    episodes: int
    steps: int
    steps_read: int  # all of them, or a sample
    episodes_alike: int  # which have another's length and return: no others can be equal
    episodes_compared: int  # of these; both also count those of the peers
    findings: tuple[Finding, ...]  # empty where nothing looks wrong in what was read

    def print(self) -> None:
        console = Terminal()
        counts = f"{count_text(self.episodes, 'episode')}, {count_text(self.steps, 'step')}"
        console.print(f"{self.path}: {counts}")
        where = ""
        if self.steps_read < self.steps:
            read = count_text(self.steps_read, "step")
            where = f" in the {read} read"
            console.print(f"{read} were read, spread evenly: --full reads all")
        if self.episodes_compared < self.episodes_alike:
            alike = count_text(self.episodes_alike, "episode")
            where += f", the {self.episodes_compared:,} episodes compared"
            line = f"{self.episodes_compared:,} of {alike} that may be the same were compared"
            console.print(f"{line}: --full compares all")
        if not self.findings:
            console.print(f"nothing looks wrong{where}")
            return
        table = Table("check", "what looks wrong", "what to do", box=None, pad_edge=False)
        for finding in self.findings:
            places = ", ".join(":".join(map(str, location)) for location in finding.places)
            more = ", ..." if finding.count > len(finding.places) > 0 else ""
            where = f" ({places}{more})" if places else ""
            table.add_row(finding.check, finding.what + where, finding.remedy)
        console.print(table)


@check_arguments()
def audit(
    dataset: Dataset | str | os.PathLike[str],
    *,
    against: Sequence[Dataset | str | os.PathLike[str]] = (),
    full: bool = False,
    quiet: bool = True,
) -> Audit:
    """Find suspicious data: boundaries, constants, clipped actions, copies, bounds.

    Parameters
    ----------
    dataset
        Opened, a directory, or an address, of which shards are read by ranges.
    against
        Datasets with which episodes are compared: those that they share are told.
    full
        Read all rows.  Otherwise boundaries, clipped actions and places are looked for in 1 GiB of
        them, spread evenly, and 256 MiB are compared of episodes that have another's length and
        return; `Audit.steps_read`, `episodes_alike` and `episodes_compared` say how many that is.
    quiet
        Show no progress.

    Returns
    -------
    Audit
        The findings.  A missing episode boundary shows as a step that goes farther than the
        data's own steps do: in half of the elements of the observation at least 8 times the
        element's mean step, and at least 3 times what one step in a hundred does.  That finds
        boundaries which are missing here and there, not ones which are missing nearly everywhere.

    Raises
    ------
    InputError
        Those of `gear_offline.open_dataset`; ``COLUMN`` for datasets that cannot be compared.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> page = go.audit("tiny", against=["tiny"])
    >>> page.findings[-1].check
    'shared'
    """
    data, *peers = (
        source if isinstance(source, Dataset) else open_to_read(source)
        for source in (dataset, *against)
    )
    for peer in peers:
        if (foreign := _describe_columns(peer)) != (columns := _describe_columns(data)):
            problem = f"{peer.name} has {foreign}, {data.name} {columns}"
            raise InputError("COLUMN", problem, "against", "compare like columns")
    every, steps, shared = [data, *peers], _Steps(data), list[Finding]()
    pieces = list(_pieces(data, full=full))
    alike, compared = _find_alike(every, full=full)
    total = sum(stop - first for first, stop in pieces)
    shown = data.address or data.path.name
    looks = map_in_threads(steps.look, pieces, usable_cores())
    with Progress(f"audit {shown}", total=total, unit="steps", quiet=quiet) as progress:
        for (first, stop), seen in zip(pieces, looks, strict=True):
            steps.add(seen)
            progress.advance(stop - first)
        digests, *others = map(_digest_compared, every, compared)
    for peer, other in zip(peers, others, strict=True):
        like = {*other.values()}
        shared_episodes = [number for number, digest in digests.items() if digest in like]
        shared += _make_findings(
            "shared", shared_episodes, f"of {len(data):,} are|is in {peer.name} too"
        )
    times = Counter(digests.values())
    several = [number for number, digest in digests.items() if times[digest] > 1]
    repeated = _make_findings("repeated", several, "are|is in the dataset more than once")
    return Audit(
        path=data.name,
        episodes=len(data),
        steps=data.spec.steps,
        steps_read=total,
        episodes_alike=alike,
        episodes_compared=sum(map(len, compared)),
        findings=(
            *steps.findings(total),
            *repeated,
            *_columns(data),
            *_endings(data),
            *_bounds(data),
            *shared,
        ),
    )


def _pieces(data: Dataset, *, full: bool) -> Iterator[tuple[int, int]]:
    """Yield runs of steps to read: all, or of large data some that are spread evenly."""
    step_bytes = max(sum(column.step_bytes for column in data.spec), 1)
    steps, rows = data.spec.steps, max(1, PIECE_BYTES // step_bytes)
    runs = [(0, steps)]
    if not full and steps * step_bytes > MOST_BYTES:
        length = max(1, MOST_BYTES // (RUNS * step_bytes))
        firsts = np.unique(np.linspace(0, steps - length, RUNS).astype(np.int64))
        runs = [(first, first + length) for first in firsts.tolist()]
    for begin, end in runs:
        for first in range(begin, end, rows):
            yield first, min(first + rows, end)


def _find_alike(datasets: Sequence[Dataset], *, full: bool) -> tuple[int, list[Int64Array]]:
    """Count the episodes that have another's length and return; choose those to compare of each.

    Returns of equal episodes differ by what rounding makes of another order, or of other floats.
    """
    lengths, returns, places = (
        np.concatenate(values)
        for values in (
            [data.episodes.lengths for data in datasets],
            [data.returns for data in datasets],
            [np.arange(len(data)) / len(data) for data in datasets],
        )
    )
    rewards = [data.spec[REWARDS] for data in datasets if REWARDS in data.spec]
    facts = [data.statistics[REWARDS] for data in datasets if REWARDS in data.spec]
    most = max((np.abs([each.min, each.max]).max() for each in facts), default=0.0)
    is_exact = {column.dtype.itemsize for column in rewards} in ({1}, {2}, {4})
    order = np.lexsort((places, returns, lengths))
    of_order = lengths[order[1:]]
    with np.errstate(invalid="ignore"):
        far = np.diff(returns[order]) > of_order * most * (of_order * 1e-15 if is_exact else 1e-6)
    is_alike = np.zeros(len(order) + 1, np.bool_)
    is_alike[1:-1] = (np.diff(lengths[order]) == 0) & ~far  # NaN is like any other
    order = order[is_alike[1:] | is_alike[:-1]]
    alike = len(order)
    if not full:  # whoever are next to each other stay together
        compared = [datasets[0].spec[name] for name in COMPARED if name in datasets[0].spec]
        step_bytes = sum(column.step_bytes for column in compared)
        order = order[: lengths[order].cumsum().searchsorted(COMPARED_BYTES / step_bytes, "right")]
    firsts = np.cumsum([0, *map(len, datasets)])
    bounds = pairwise(firsts.tolist())
    return alike, [np.sort(order[(a <= order) & (order < b)] - a) for a, b in bounds]


def _digest_compared(data: Dataset, numbers: Int64Array) -> dict[int, bytes]:
    """Return digests of episodes: equal ones share one, in floats of either precision too."""
    part = data if len(numbers) == len(data) else view_episodes(data, numbers)
    names = [name for name in COMPARED if name in data.spec]
    digests = digest_episodes(part, names) if len(numbers) else []
    return dict(zip(numbers.tolist(), digests, strict=True))


class _Places:
    """A number of steps, and the first of them."""

    def __init__(self, offsets: Int64Array) -> None:
        self.count, self.first, self._offsets = 0, list[tuple[int, int]](), offsets

    def add(self, steps: Int64Array) -> None:
        """Add steps of the data; first ones start episodes, and do not count."""
        episodes = self._offsets.searchsorted(steps, "right") - 1
        within = steps - self._offsets[episodes]
        inside = within > 0
        self.count += int(inside.sum())
        pairs = zip(episodes[inside][:EXAMPLES], within[inside][:EXAMPLES], strict=True)
        self.first += [(int(e), int(t)) for e, t in pairs][: EXAMPLES - len(self.first)]


class _Seen(NamedTuple):
    """What a piece of the rows shows."""

    far: Int64Array  # steps that go far from the one before
    unlike: Int64Array  # steps that are not what the one before says of them
    clipped: Any  # (A,) steps on an action's extreme
    outliers: dict[tuple[str, int], int]  # the first step, by column and element


class _Steps:
    """Checks of steps, which are read in order."""

    def __init__(self, data: Dataset) -> None:
        self._data, offsets = data, data.episodes.offsets
        self._clipped: Any = 0
        self._jumps, self._unlike = _Places(offsets), _Places(offsets)
        self._usual, self._limit = np.zeros(0), np.inf  # (S,) mean size of a step
        if "observations" in data.spec and data.spec["observations"].dtype.kind == "f":
            moves = np.concatenate([_moves(rows) for rows in _sample(data)])
            self._usual = moves.mean(0) if len(moves) else self._usual
            if (self._usual > 0).any():
                self._limit = max(FAR, FARTHER * float(np.quantile(self._scores(moves), 0.99)))
        self._outliers = dict[str, dict[int, int]]()  # by column and element, the first step read
        for column in data.spec:
            if column.dtype.kind != "f":
                continue
            facts = data.statistics[column.name]
            low, high = facts.min.reshape(-1), facts.max.reshape(-1)
            mean, std = facts.mean.reshape(-1), facts.std.reshape(-1)
            beyond = (np.maximum(high - mean, mean - low) > OUTLIER * std) & (std > 0)
            if beyond.any():
                elements = np.flatnonzero(beyond).tolist()
                self._outliers[column.name] = dict.fromkeys(elements, -1)

    def _scores(self, moves: Float64Array) -> Float64Array:
        """Return (T - 1,): the multiple of their mean step that half of the elements reach."""
        is_moving = self._usual > 0
        scores: Float64Array = np.median(moves[:, is_moving] / self._usual[is_moving], axis=1)
        return scores

    def _find_far(self, observations: Array) -> Int64Array:
        """Return which of (T - 1,) moves go farther than the data's own do."""
        rows = observations.reshape(len(observations), -1)
        rows = rows if rows.dtype.itemsize > 2 else rows.astype(np.float32)
        is_moving = self._usual > 0
        least = (self._usual * self._limit * (1 - 1e-5)).astype(rows.dtype)  # before rounding
        with np.errstate(all="ignore"):
            reach = (np.abs(np.diff(rows, axis=0)) > least) & is_moving
        elements = np.bincount(np.flatnonzero(reach) // len(least), minlength=len(reach))
        maybe = np.flatnonzero(2 * elements >= is_moving.sum())
        if not len(maybe):
            return maybe
        pairs = rows[np.stack([maybe, maybe + 1], axis=1).ravel()]
        return maybe[self._scores(_moves(pairs)[::2]) > self._limit]

    def look(self, bounds: tuple[int, int]) -> _Seen:
        """Look at some rows."""
        data, (first, stop) = self._data, bounds
        before = max(first - 1, 0)  # the row that the first one follows
        names = [column.name for column in data.spec]
        columns = {name: data.read(name, before, stop) for name in names}
        far = unlike = np.zeros(0, np.int64)
        if np.isfinite(self._limit):
            far = self._find_far(columns["observations"])
        if {"observations", "next_observations"} <= columns.keys():
            observed, reached = columns["observations"][1:], columns["next_observations"][:-1]
            if observed.shape == reached.shape:
                differs = (observed != reached) & ((observed == observed) | (reached == reached))
                unlike = np.flatnonzero(differs.reshape(len(differs), -1).any(1))
        clipped: Any = 0
        if "actions" in data.spec and data.spec["actions"].dtype.kind == "f":
            facts, rows = data.statistics["actions"], columns["actions"][first - before :]
            at_end = (rows == facts.min.astype(rows.dtype)) | (rows == facts.max.astype(rows.dtype))
            clipped = (at_end & (facts.std > 0)).reshape(len(rows), -1).sum(0)
        outliers = dict[tuple[str, int], int]()
        for name, elements in self._outliers.items():
            facts, rows = data.statistics[name], columns[name].reshape(stop - before, -1)
            mean, std = facts.mean.reshape(-1), facts.std.reshape(-1)
            for element in elements:
                beyond = np.abs(rows[:, element] - mean[element]) > OUTLIER * std[element]
                if beyond.any():
                    outliers[name, element] = before + int(beyond.argmax())
        return _Seen(before + 1 + far, before + 1 + unlike, clipped, outliers)

    def add(self, seen: _Seen) -> None:
        """Add what the next rows show."""
        self._jumps.add(seen.far)
        self._unlike.add(seen.unlike)
        self._clipped += seen.clipped
        for (name, element), step in seen.outliers.items():
            if self._outliers[name][element] < 0:
                self._outliers[name][element] = step

    def findings(self, steps: int) -> Iterator[Finding]:
        """Yield what is wrong in so many steps."""
        problem = "inside episodes go|goes farther than the data's own steps: an episode boundary "
        problem += "may be missing before"
        jumps, unlike = self._jumps, self._unlike
        yield from _make_findings("boundary", jumps.first, problem, count=jumps.count)
        problem = "show|shows another observation than next_observations of the step before"
        yield from _make_findings("boundary", unlike.first, problem, count=unlike.count)
        shares = np.atleast_1d(self._clipped) / steps
        problem = f"of actions lie|lies on an extreme in up to {shares.max():.0%} of the steps"
        yield from _make_findings("clipped", np.flatnonzero(shares > CLIPPED_SHARE), problem)
        offsets = self._data.episodes.offsets
        for name, elements in self._outliers.items():
            problem = f"of {name} reach|reaches more than {OUTLIER:g} standard deviations from "
            problem += "the mean"
            found = np.array([step for step in elements.values() if step >= 0], np.int64)
            episodes = offsets.searchsorted(found, "right") - 1
            pairs = zip(episodes.tolist(), (found - offsets[episodes]).tolist(), strict=True)
            yield from _make_findings("outlier", pairs, problem, count=len(elements))


def _columns(data: Dataset) -> Iterator[Finding]:
    for name, facts in data.statistics.items():
        yield from _make_findings(
            "nonfinite", (), f"of {name} are|is NaN or infinite", count=facts.nonfinite
        )
        if name in COMPARED:
            constant = np.flatnonzero(facts.std.reshape(-1) == 0)
            yield from _make_findings("constant", constant, f"of {name} never change|changes")


def _endings(data: Dataset) -> Iterator[Finding]:
    source, lengths = data.manifest.source, data.episodes.lengths
    names = [column.name for column in data.spec]
    odd = odd_episodes(lengths, data.terminated, source.rule, source.attributes, names)
    for episodes, problem, remedy in odd:
        for finding in _make_findings("ending", episodes, problem):
            yield replace(finding, remedy=f"convert it again: {remedy}")
    if lengths[-1] == source.attributes.get("unfinished_tail_steps"):
        yield from _make_findings(
            "ending", [len(lengths) - 1], "at the end is unfinished: it has no flag"
        )
    open_ends = np.flatnonzero(~(data.terminated | data.truncated))
    if open_ends.size > 1:  # the last one is often cut
        yield from _make_findings("ending", open_ends, "end without a flag")


def _bounds(data: Dataset) -> Iterator[Finding]:
    """Compare actions with the environment's bounds, where it can be made here."""
    if data.environment_id is None or "actions" not in data.spec:
        return
    try:
        environment = probe(data.environment_id, data.environment_options)
    except GearError:
        return
    facts = data.statistics["actions"]
    low, high = facts.min.reshape(-1), facts.max.reshape(-1)
    least, most = environment.low, environment.high
    if environment.discrete:
        least, most = np.zeros(1, np.float32), np.full(1, environment.choices - 1, np.float32)
    elif least.size != low.size:
        return
    beyond = np.flatnonzero((low < least - 1e-6) | (high > most + 1e-6))
    if beyond.size:
        problem = f"of actions reach|reaches {low[beyond].min():.4g} to {high[beyond].max():.4g}; "
        problem += f"{data.environment_id} takes {least.min():g} to {most.max():g}"
        yield from _make_findings("bounds", beyond, problem)


def _make_findings(
    check: str, places: Iterable[Any], problem: str, *, count: int | None = None
) -> Iterator[Finding]:
    """Yield a finding for `places` (numbers or tuples) or a `count`, if there are any.

    Of the first verb ``PLURAL|SINGULAR`` in `problem` the one that the count takes stays.
    """
    every = places if isinstance(places, np.ndarray) else list(places)
    if count := len(every) if count is None else count:
        noun, remedy = CHECKS[check]
        first = tuple(at if isinstance(at, tuple) else (int(at),) for at in every[:EXAMPLES])
        problem = re.sub(r"(\w+)\|(\w+)", r"\2" if count == 1 else r"\1", problem, count=1)
        problem = f"{count_text(count, noun)} {problem}"
        yield Finding(check=check, what=problem, remedy=remedy, count=count, places=first)


def _moves(observations: Array) -> Float64Array:
    """Return (T - 1, S): how far each element goes in a step; steps with NaN go nowhere."""
    rows = observations.astype(np.float64)
    return np.nan_to_num(np.abs(np.diff(rows.reshape(len(rows), -1), axis=0)), posinf=0.0)


def _sample(data: Dataset) -> Iterator[Array]:
    """Yield the observations of some episodes, or of parts of long ones, spread over the data."""
    step_bytes = 8 * int(np.prod(data.spec["observations"].shape, dtype=np.int64))
    most = int(np.clip(SAMPLED_BYTES // (SAMPLED_STEPS * max(step_bytes, 1)), 10, SAMPLED_PARTS))
    offsets = data.episodes.offsets
    ends = np.cumsum(-(-data.episodes.lengths // SAMPLED_STEPS))  # parts of an episode and before
    for chunk in np.unique(np.linspace(0, ends[-1] - 1, min(int(ends[-1]), most)).astype(int)):
        number = int(ends.searchsorted(chunk, "right"))
        first = int(offsets[number]) + SAMPLED_STEPS * int(
            chunk - (ends[number - 1] if number else 0)
        )
        stop = min(first + SAMPLED_STEPS, int(offsets[number + 1]))
        yield data.read("observations", first, stop)


def _describe_columns(data: Dataset) -> str:
    """Describe the columns that make two episodes of datasets the same."""
    specs = [data.spec[name] for name in COMPARED if name in data.spec]
    kinds = [(c.name, "float" if c.dtype.kind == "f" else c.dtype, c.shape) for c in specs]
    return ", ".join(f"{name} {type_text}{list(shape)}" for name, type_text, shape in kinds)
