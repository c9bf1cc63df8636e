"""Doubts about the data that convert reads or wrote, with the option that would change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.data.convert.edits import Edits
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import REWARDS, ColumnSpec
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.columns import kinds_of, split_names
from gear_offline.data.sources.flat import REQUIRED
from gear_offline.data.sources.plausible import late_rows, odd_episodes
from gear_offline.errors import InputError

PICTURES = (b"\xff\xd8\xff", b"\x89PNG")  # the beginning of a file
NEXT = "next_observations"
COMPARED_BYTES = 4 << 20  # of observations and next ones, at a time
BLOCK_STEPS = 1 << 20  # of actions that are looked at, at a time
MOST_CHOICES = 1000  # whole numbers below this in a float column look like numbers of choices


def doubt_episodes(source: Source, *, is_shifted: bool) -> Iterator[str]:
    """Yield doubts about where a source's episodes end, and about the columns of its rows."""
    info, lengths = source.info, source.episodes.lengths
    odd = odd_episodes(lengths, source.terminated, info.rule, info.attributes, kinds_of(source))
    for episodes, oddity, remedy in odd:
        yield f"{count_text(episodes.size, 'episode')} {oddity}: is this what you meant? {remedy}"
    if not is_shifted:
        yield from late_rows(kinds_of(source))


def check_required(source: Source, edits: Edits) -> None:
    """Refuse a source without observations or actions, unless columns, or new names, leave them."""
    lacking = _lacking((*kinds_of(source), *dict(edits.names).values()))
    if lacking and edits.columns is None and source.info.format != "gear":
        subject = "map made" if edits.function is not None else "there are"
        problem = f"{subject} no {' and no '.join(lacking)}"
        remedy = f"return them from map, or name others: --rename NAME={lacking[0]}, --columns"
        raise InputError("COLUMN", problem, source.info.uri, remedy)


def doubt_columns(source: Source, edits: Edits, stored: Sequence[ColumnSpec]) -> Iterator[str]:
    """Yield doubts about missing rewards, and about what the user's names leave out."""
    if REWARDS not in source.spec:
        name = "next.success" if "next.success" in source.spec else "NAME"
        lost = "no rewards, so no returns: goals and cloning need none"
        yield f"{lost}; --rename {name}=rewards takes a column"
    origins = chain(*map(split_names, dict(edits.names).values()))
    before = _lacking((*kinds_of(source), *origins))
    if left_out := [n for n in _lacking(c.name for c in stored) if n not in before]:
        note = f"no {' and no '.join(left_out)} with these --columns or --rename: training needs "
        yield f"{note}them" + ", or others by loader.observations" * (REQUIRED[0] in left_out)


def _lacking(names: Iterable[str]) -> list[str]:
    """Return the required columns that are neither there nor above one that is."""
    groups = {name.split("/")[0] for name in names}
    return [name for name in REQUIRED if name not in groups]


def doubt_last_rows(source: Source, edits: Edits) -> Iterator[str]:
    """Yield doubts about unused last rows, unless their episode is left out."""
    mask = edits.chosen_episodes
    steps, ends = source.spec.steps, source.episodes.offsets[1:]
    names = [name for name in kinds_of(source) if name.split("/")[0] in (REWARDS, *REQUIRED)][::-1]
    last = (source.read(name, steps - 2, steps) for name in names)  # mostly of rewards alone
    if (
        (mask is None or mask[-1])
        and names
        and ends.size > 1
        and ends[-1] - ends[-2] > 1
        and not any(rows.any() for rows in last)
    ):
        doubt = "the last rows are all zeros, as of a buffer that was not full"
        yield f"{doubt}; --where 'episode < {ends.size - 1}' leaves the last episode out"


def refuse_encoded(source: Source, columns: Sequence[ColumnSpec]) -> None:
    """Refuse observations whose rows are files of pictures, as some recorders compress them."""
    observed = [c for c in columns if c.name.split("/")[0] == "observations"]
    for column in (c for c in observed if c.dtype == np.uint8 and len(c.shape) == 1):
        if source.read(column.name, 0, 1).tobytes().startswith(PICTURES):
            problem = f"{column.name} holds JPEG or PNG files in rows of bytes"
            raise InputError("COLUMN", problem, source.info.uri, "decode them in a --map function")


def doubt_actions(dataset: Dataset) -> list[str]:
    """Return a note if actions look like numbers of choices that are stored as floats."""
    statistics, steps = dataset.manifest.statistics.get("actions"), dataset.spec.steps
    if statistics is None or statistics.mean.size != 1:
        return []
    low, high = statistics.min.item(), statistics.max.item()
    if not (dataset.spec["actions"].dtype.kind == "f" and 0 <= low <= high < MOST_CHOICES):
        return []
    bounds = ((start, min(start + BLOCK_STEPS, steps)) for start in range(0, steps, BLOCK_STEPS))
    blocks = (dataset.read("actions", *bound) for bound in bounds)
    if not all((rows == np.rint(rows)).all() for rows in blocks):
        return []
    note = f"note: actions look like whole numbers from 0 to {high:.0f}"
    return [f"{note}; if they are numbers of choices, convert with --discrete actions"]


def doubt_order(data: Source | Dataset) -> str:
    """Return a doubt about rows whose next observations the next row of their episode has not."""
    pairs, steps, ends = observation_pairs(data), data.spec.steps, data.episodes.offsets[1:]
    jumps = 0
    width = sum(data.spec[name].step_bytes for _, name in pairs)
    rows = max(1, COMPARED_BYTES // max(width, 1))
    for start in range(0, steps - 1, rows) if pairs else ():
        stop = min(start + rows, steps - 1)
        is_far = np.zeros(stop - start, np.bool_)
        for after, now in pairs:
            expected = data.read(after, start, stop).reshape(stop - start, -1)
            observed = data.read(now, start + 1, stop + 1).reshape(stop - start, -1)
            differ = np.flatnonzero((expected != observed).any(1))
            near = np.isclose(expected[differ], observed[differ], 1e-3, 1e-3, equal_nan=True)
            is_far[differ] |= ~near.all(1)
        first, last = np.searchsorted(ends, (start + 1, stop + 1))
        is_far[ends[first:last] - start - 1] = False
        jumps += int(is_far.sum())
    if not jumps:
        return ""
    doubt = f"at {jumps:,} of {count_text(steps, 'step')} {NEXT} are not those of the next row"
    if 2 * jumps > steps and (lag := _turn_length(data, pairs)):
        return f"{doubt}, but {lag} on, as of {lag} environments in turn: --ends by:{lag}"
    return f"{doubt}: ends are missing (--ends KIND:COLUMN), or rows are out of order"


def _turn_length(data: Source | Dataset, pairs: list[tuple[str, str]]) -> int:
    """Return the distance in rows between an observation and the next one; 0: unknown."""
    width = sum(data.spec[name].step_bytes for _, name in pairs)
    rows = min(data.spec.steps, 3 + COMPARED_BYTES // max(width, 1))
    after, now = (
        np.concatenate([data.read(pair[side], 0, rows).reshape(rows, -1) for pair in pairs], 1)
        for side in (0, 1)
    )

    def is_mostly_next(lag: int) -> bool:
        near = np.isclose(after[:-lag], now[lag:], 1e-3, 1e-3, equal_nan=True)
        return 2 * int(near.all(1).sum()) > rows

    alike = np.isclose(now, after[0], 1e-3, 1e-3, equal_nan=True).all(1)
    lags = [lag for lag in np.flatnonzero(alike).tolist() if 1 < lag <= rows // 3]
    return next((lag for lag in lags[:100] if is_mostly_next(lag)), 0)


def observation_pairs(data: Source | Dataset) -> list[tuple[str, str]]:
    """Return observations and their next ones: of vectors, if there are any."""
    kinds = kinds_of(data)
    candidates = [(f"next_{name}", name) for name in kinds if name.split("/")[0] == REQUIRED[0]]
    pairs = [pair for pair in candidates if kinds.get(pair[0]) == kinds[pair[1]]]
    return [pair for pair in pairs if len(kinds[pair[1]][1]) < 2] or pairs
