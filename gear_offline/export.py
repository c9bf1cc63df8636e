"""Write a dataset as one HDF5 file in D4RL's layout, for programs that read that.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import gear_offline
from gear_offline.core.progress import progress, say
from gear_offline.core.text import count_text
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.sources import open_source
from gear_offline.sources.base import Source
from gear_offline.sources.combine import dataset_source

PIECE_BYTES = 32 << 20  # read and written at a time
TERMINALS, TIMEOUTS, REWARDS = "terminals", "timeouts", "rewards"


def export_hdf5(
    source: Dataset | Source | str | Path,
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write all episodes of a dataset to an HDF5 file in D4RL's layout.

    Columns keep names, dtypes and bytes.  ``terminals`` and ``timeouts`` are there in any case and
    say where the dataset's episodes end: a timeout marks the last step of each episode that did
    not terminate, and none is inside an episode.  A ``terminals`` column of the dataset is kept as
    it is; if it marks steps inside episodes, a timeout marks the last step of every episode.

    Parameters
    ----------
    source
        An opened dataset, its directory, or an open source (left open), such as `pick_episodes`
        makes.
    path
        File to make.  It appears when it is complete.
    columns
        Columns to keep, default all; `rewards` and the two flags are always there.
    overwrite
        Replace a file that exists.
    quiet
        Show no progress, no warning.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS``, ``OUTPUT_FOLDER``, ``COLUMN_MISSING``, ``COLUMN_NAME``, and what reading
        raises.
    GearError
        ``OUTPUT_SPACE``, ``OUTPUT_WRITE``.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import h5py
    >>> import gear_offline as go
    >>> path = go.export_hdf5("tiny", "tiny.hdf5", quiet=True)
    >>> with h5py.File(path) as file:
    ...     print(sorted(file), file["observations"].shape)
    ['actions', 'observations', 'rewards', 'terminals', 'timeouts'] (12, 3)
    """
    from gear_offline.core.hdf5_writer import Hdf5Writer

    path = Path(path)
    with ExitStack() as stack:
        if isinstance(source, Dataset):
            opened: Source = dataset_source(source)
        elif isinstance(source, (str, Path)):
            opened = stack.enter_context(open_source(source))
        else:
            opened = source
        kept = _kept(opened, columns)
        _check_names(kept, path)
        writer = stack.enter_context(Hdf5Writer(path, overwrite=overwrite))
        step_bytes = sum(opened.spec[name].step_bytes for name in kept)
        total = step_bytes * opened.spec.steps
        show = progress(total, f"export {path.name}", unit="bytes", quiet=quiet)
        advance = stack.enter_context(show)
        rows = max(1, PIECE_BYTES // step_bytes)
        inside = _terminals_inside(opened, rows)
        for start in range(0, opened.spec.steps, rows):
            stop = min(start + rows, opened.spec.steps)
            part = {name: opened.read(name, start, stop) for name in kept}
            _set_flags(part, opened, start, stop, every=inside > 0)
            writer.hold(part, stop - start)
            advance(step_bytes * (stop - start))
        with writer.writing():
            writer.complete(_attributes(opened), {})
            writer.publish()
    if inside:
        say(
            f"warning: terminals marks {count_text(inside, 'step')} inside episodes: a reader that "
            "splits there finds other episodes",
            quiet=quiet,
        )
    return path


def _kept(source: Source, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return [c.name for c in source.spec]
    wanted = {REWARDS, *(source.spec[name].name for name in columns)}
    wanted |= {name for name in (TERMINALS, TIMEOUTS) if name in source.spec}
    return [c.name for c in source.spec if c.name in wanted]


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse a column whose name is that of a group too, which holds other columns."""
    for name in names:
        below = next((other for other in names if other.startswith(f"{name}/")), None)
        if below is not None:
            raise InputError(
                "COLUMN_NAME",
                f"an HDF5 file cannot hold both {name} and {below}: {name} would be a dataset and "
                "a group",
                where=str(path),
                remedy="name the columns to keep, without one of them: columns=[...]",
            )


def _ends(source: Source, start: int, stop: int) -> npt.NDArray[np.intp]:
    """Return which of the steps ``[start, stop)`` end an episode, and of which one, (2, n)."""
    offsets = source.episodes.offsets
    first = int(np.searchsorted(offsets[1:], start, side="right"))
    last = int(np.searchsorted(offsets[1:], stop, side="right"))
    return np.stack([offsets[first + 1 : last + 1] - 1 - start, np.arange(first, last)])


def _terminals_inside(source: Source, rows: int) -> int:
    """Return how many terminals mark a step inside an episode, reading `rows` at a time."""
    inside = 0
    for start in range(0, source.spec.steps if TERMINALS in source.spec else 0, rows):
        stop = min(start + rows, source.spec.steps)
        flags = source.read(TERMINALS, start, stop).reshape(-1) != 0
        inside += int(flags.sum()) - int(flags[_ends(source, start, stop)[0]].sum())
    return inside


def _set_flags(
    part: dict[str, npt.NDArray[Any]], source: Source, start: int, stop: int, *, every: bool
) -> None:
    """Complete the flags of steps ``[start, stop)``; with `every`, all ends are timeouts."""
    ends, episodes = _ends(source, start, stop)
    is_end, terminated = np.zeros((2, stop - start), np.bool_)
    is_end[ends] = True
    terminated[ends] = source.terminated[episodes]
    timeouts = is_end if every else is_end & ~terminated
    if TIMEOUTS in part:
        timeouts |= is_end & (part[TIMEOUTS].reshape(-1) != 0)
    part[TIMEOUTS] = timeouts
    if TERMINALS not in part:
        part[TERMINALS] = terminated


def _attributes(source: Source) -> dict[str, Any]:
    info = source.info
    found: dict[str, Any] = {
        "exported_from": f"{info.uri} ({info.format}; rule {info.rule})",
        "gear_offline": gear_offline.__version__,
    }
    if info.environment_id:
        found["env_id"] = info.environment_id
    return found
