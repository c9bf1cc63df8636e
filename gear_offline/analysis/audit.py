"""Find suspicious data, with places and remedies; `inspect` describes the rest.

Shape legend: N steps, E episodes, T steps of an episode, S elements of an observation.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from gear_offline.config.arguments import check_arguments
from gear_offline.core.progress import Progress, Terminal
from gear_offline.core.text import Document, count_text
from gear_offline.core.types import Array, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import Columns, Dataset, open_to_read
from gear_offline.data.dataset.split import digest_episodes
from gear_offline.data.sources.plausible import odd_episodes
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import probe

COMPARED = ("observations", "actions", "rewards")  # what makes two episodes the same
PIECE_BYTES = 16 << 20  # that are read at a time
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
    findings: tuple[Finding, ...]  # empty where nothing looks wrong

    def print(self) -> None:
        console = Terminal()
        counts = f"{count_text(self.episodes, 'episode')}, {count_text(self.steps, 'step')}"
        console.print(f"{self.path}: {counts}")
        if not self.findings:
            console.print("nothing looks wrong")
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
    quiet: bool = True,
) -> Audit:
    """Find suspicious data: boundaries, constants, clipped actions, copies, bounds.

    Parameters
    ----------
    dataset
        Opened, a directory, or an address, of which shards are read by ranges.
    against
        Datasets with which episodes are compared: those that they share are told.
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
    steps, shared = _Steps(data), list[Finding]()
    total = sum(each.spec.steps for each in (data, *peers))
    with Progress(f"audit {data.path.name}", total=total, unit="steps", quiet=quiet) as progress:
        for first, rows in _pieces(data, [column.name for column in data.spec]):
            progress.advance(steps.read(first, rows))
        for peer in peers:
            alike = {*_digest_compared(peer)}
            progress.advance(peer.spec.steps)
            shared_episodes = [e for e, digest in enumerate(steps.digests) if digest in alike]
            shared += _make_findings(
                "shared", shared_episodes, f"of {len(data):,} are|is in {peer.name} too"
            )
    return Audit(
        path=data.name,
        episodes=len(data),
        steps=data.spec.steps,
        findings=(*steps.findings(), *_columns(data), *_endings(data), *_bounds(data), *shared),
    )


def _pieces(data: Dataset, names: Sequence[str]) -> Iterator[tuple[int, Columns]]:
    """Yield all rows of columns, some at a time, with the number of each first one."""
    rows = max(1, PIECE_BYTES // max(sum(data.spec[name].step_bytes for name in names), 1))
    for first in range(0, data.spec.steps, rows):
        stop = min(first + rows, data.spec.steps)
        yield first, {name: data.read(name, first, stop) for name in names}


def _digest_compared(data: Dataset) -> list[bytes]:
    """Return digests of episodes: equal ones share one, in floats of either precision too."""
    return digest_episodes(data, [name for name in COMPARED if name in data.spec])


class _Places:
    """A number of steps, and the first of them."""

    def __init__(self) -> None:
        self.count, self.first = 0, list[tuple[int, int]]()

    def add(self, episodes: Int64Array, steps: Int64Array) -> None:
        """Add steps, with their episodes; first ones start episodes, and do not count."""
        inside = steps > 0
        self.count += int(inside.sum())
        pairs = zip(episodes[inside][:EXAMPLES], steps[inside][:EXAMPLES], strict=True)
        self.first += [(int(e), int(t)) for e, t in pairs][: EXAMPLES - len(self.first)]


class _Steps:
    """Checks of steps and episodes, which are read in order."""

    def __init__(self, data: Dataset) -> None:
        self._data, self._before = data, dict[str, Any]()  # the last row that was read
        self.digests = _digest_compared(data)
        self._clipped: Any = 0  # (A,) steps on an action's extreme
        self._outliers = defaultdict[str, dict[int, tuple[int, int]]](dict)  # by element, the first
        self._jumps, self._unlike = _Places(), _Places()
        self._usual, self._limit = np.zeros(0), np.inf  # (S,) mean size of a step
        if "observations" in data.spec and data.spec["observations"].dtype.kind == "f":
            moves = np.concatenate([_moves(rows) for rows in _sample(data)])
            self._usual = moves.mean(0) if len(moves) else self._usual
            if (self._usual > 0).any():
                self._limit = max(FAR, FARTHER * float(np.quantile(self._scores(moves), 0.99)))

    def _scores(self, moves: Float64Array) -> Float64Array:
        """Return (T - 1,): the multiple of their mean step that half of the elements reach."""
        is_moving = self._usual > 0
        scores: Float64Array = np.median(moves[:, is_moving] / self._usual[is_moving], axis=1)
        return scores

    def read(self, first: int, columns: Columns) -> int:
        """Look at the rows from `first` on; return how many."""
        count, offsets = len(next(iter(columns.values()))), self._data.episodes.offsets
        places = np.arange(first, first + count)
        numbers = offsets.searchsorted(places, "right") - 1
        steps = places - offsets[numbers]
        names = [n for n in ("observations", "next_observations") if n in columns]
        lead = len(self._before.get("observations", ()))  # the row before the first one, or none
        extended = {
            n: np.concatenate([self._before.get(n, columns[n][:0]), columns[n]]) for n in names
        }
        self._before = {name: columns[name][-1:] for name in names}
        if np.isfinite(self._limit):
            far = np.flatnonzero(self._scores(_moves(extended["observations"])) > self._limit)
            self._jumps.add(numbers[far + 1 - lead], steps[far + 1 - lead])
        if len(names) == 2:
            observed, reached = extended["observations"][1:], extended["next_observations"][:-1]
            if observed.shape == reached.shape:
                differs = (observed != reached) & ((observed == observed) | (reached == reached))
                unlike = np.flatnonzero(differs.reshape(len(differs), -1).any(1))
                self._unlike.add(numbers[unlike + 1 - lead], steps[unlike + 1 - lead])
        for name in (column.name for column in self._data.spec if column.dtype.kind == "f"):
            facts, rows = self._data.statistics[name], columns[name].reshape(len(columns[name]), -1)
            mean, std = facts.mean.reshape(-1), facts.std.reshape(-1)
            if name == "actions":
                at_end = (rows == facts.min.reshape(-1)) | (rows == facts.max.reshape(-1))
                self._clipped += (at_end & (std > 0)).sum(0)
            far = (np.abs(rows - mean) > OUTLIER * std) & (std > 0)
            for element in np.flatnonzero(far.any(0)).tolist():
                row = far[:, element].argmax()
                self._outliers[name].setdefault(element, (int(numbers[row]), int(steps[row])))
        return count

    def findings(self) -> Iterator[Finding]:
        problem = "inside episodes go|goes farther than the data's own steps: an episode boundary "
        problem += "may be missing before"
        jumps, unlike = self._jumps, self._unlike
        yield from _make_findings("boundary", jumps.first, problem, count=jumps.count)
        problem = "show|shows another observation than next_observations of the step before"
        yield from _make_findings("boundary", unlike.first, problem, count=unlike.count)
        shares = np.atleast_1d(self._clipped) / self._data.spec.steps
        problem = f"of actions lie|lies on an extreme in up to {shares.max():.0%} of the steps"
        yield from _make_findings("clipped", np.flatnonzero(shares > CLIPPED_SHARE), problem)
        for name, first in self._outliers.items():
            problem = f"of {name} reach|reaches more than {OUTLIER:g} standard deviations from "
            problem += "the mean"
            yield from _make_findings("outlier", first.values(), problem)
        times = Counter(self.digests)
        several = [e for e, digest in enumerate(self.digests) if times[digest] > 1]
        yield from _make_findings("repeated", several, "are|is in the dataset more than once")


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
    every = [location if isinstance(location, tuple) else (int(location),) for location in places]
    if count := len(every) if count is None else count:
        (noun, remedy), first = CHECKS[check], tuple(every[:EXAMPLES])
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
