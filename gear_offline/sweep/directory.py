"""The directory of a sweep: one ordinary run directory a point, and what is known of all of them.

::

    runs/hopper-medium-sweep/
      sweep.json           the points, how they were run, where each stands, the table at the end;
                           points that were not asked for last stand apart, under ``others``
      runs/NAME/           a run directory each, as `train` writes it
      sweep.md, plots/     the report
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.core.files import read_regular, write_file
from gear_offline.errors import InputError
from gear_offline.runs.held_directory import LOCK, HeldDirectory
from gear_offline.sweep.points import SweepPoint, flat
from gear_offline.training.metrics import finite

FORMAT = 1
MOST_BYTES = 1 << 30


class SweepDirectory(HeldDirectory):
    """A sweep's directory held for writing; a context manager.

    Parameters
    ----------
    path
        Created when missing.
    points
        What is to be run.  Of a sweep that is there they are all points, some, or more; points
        that are not asked for stay as they are.
    free
        Dotted options that may differ from those of the sweep's beginning.
    others
        Whether recipes may differ in more than in the sweep before, and runs be there that no
        sweep has made; points of the same name must still be the same.

    Raises
    ------
    InputError
        ``SWEEP_EXISTS`` for a sweep whose points are others than these or differ in something
        else, ``SWEEP_LOCKED`` when another process runs
        it, ``SWEEP_DIRECTORY`` when the place cannot be the directory of a sweep.

    Attributes
    ----------
    document
        Content of ``sweep.json``.
    """

    def __init__(
        self,
        path: Path,
        points: Sequence[SweepPoint],
        *,
        free: Sequence[str],
        others: bool = False,
    ) -> None:
        self.path, self._others = path, others
        self._refuse_foreign()
        taken = InputError(
            "SWEEP_LOCKED",
            "another process is running this sweep",
            where=str(path),
            remedy="wait for it, or sweep into another directory",
        )
        super().__init__(path, unusable="SWEEP_DIRECTORY", taken=taken)
        try:
            self.document = self._read() if self.json_path.exists() else {}
            if self.document:
                self._check_same(points, set(free))
        except InputError:
            self.close()
            raise
        rows = [
            {
                "name": point.name,
                "seed": point.recipe.seed,
                "settings": dict(point.settings),
                "recipe": point.recipe.to_dict(),
            }
            for point in points
        ]
        before = {row["name"]: row for row in recorded_points(self.document)}
        for row in rows:
            row["error"] = before.pop(str(row["name"]), {}).get("error")
        self.document |= {
            "format": FORMAT,
            "recipe": points[0].recipe.name,
            "points": rows,
            "others": list(before.values()),
        }

    @property
    def json_path(self) -> Path:
        return self.path / "sweep.json"

    def run_path(self, point: SweepPoint) -> Path:
        """Return the run directory of a point."""
        return self.path / "runs" / point.name

    def note(self, **values: Any) -> None:
        """Put values into ``sweep.json``."""
        self.document |= values
        self._write()

    def note_run(self, name: str, **values: Any) -> None:
        """Put values into a point's row of ``sweep.json``."""
        self.note_runs({name: values})

    def note_runs(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Put values into the rows of points, by name; the file is written once."""
        for row in self.document["points"]:
            row.update(values.get(row["name"], {}))
        self._write()

    def _write(self) -> None:
        text = json.dumps(finite(self.document), indent=2, allow_nan=False) + "\n"
        write_file(self.json_path, text.encode())

    def _refuse_foreign(self) -> None:
        path = self.path
        if path.exists() and not path.is_dir():
            raise InputError(
                "SWEEP_DIRECTORY",
                "not a directory",
                where=str(path),
                remedy="give another place with --out",
            )
        there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        own = {LOCK, ".sweep.json.partial", *(("runs",) if self._others else ())}
        if there - own and not self.json_path.is_file():
            raise InputError(
                "SWEEP_DIRECTORY",
                "the directory is not empty and holds no sweep",
                where=str(path),
                remedy="give another directory with --out",
            )

    def _read(self) -> dict[str, Any]:
        return read_sweep(self.path)

    def _check_same(self, points: Sequence[SweepPoint], free: set[str]) -> None:
        now = {point.name: point for point in points}
        what = ""
        for row in recorded_points(self.document):
            point, besides = now.get(row["name"]), free
            if point is None:
                if self._others:
                    continue
                point = points[0]
                more = sorted(point.settings.keys() - row["settings"].keys())
                if more:  # then runs are called otherwise, and the old ones would be run again
                    what = f"{row['name']} is one of them, and {more[0]} was the same for all"
                    break
                # of what all have in common nothing differs, or names would not tell runs apart
                besides = free | {"seed", *row["settings"]}
            old, new = flat(row["recipe"]), flat(point.recipe.to_dict())
            keys = sorted({*old, *new} - besides)
            changed = next((k for k in keys if old.get(k) != new.get(k)), "")
            if changed:
                what = f"{changed} of {row['name']} was {old.get(changed)!r} and is "
                what += f"{new.get(changed)!r} now"
                break
        if what:
            raise InputError(
                "SWEEP_EXISTS",
                f"there is a sweep of other points: {what}",
                where=str(self.path),
                remedy="ask for some or all of its points, and for more if you like, or give "
                "another directory with --out",
            )


def recorded_points(document: Mapping[str, Any]) -> list[Any]:
    """Return the rows of all points of a ``sweep.json``, those asked for last first."""
    return [*document.get("points", ()), *document.get("others", ())]


def recorded_options(path: Path) -> tuple[str, ...]:
    """Return the dotted options that name the runs of a sweep; nothing where there is none.

    Raises
    ------
    InputError
        ``SWEEP_DIRECTORY`` if its ``sweep.json`` is damaged.
    """
    if not (path / "sweep.json").is_file():
        return ()
    return tuple(read_sweep(path)["points"][0]["settings"])


def read_sweep(path: Path) -> dict[str, Any]:
    """Return the content of a sweep's ``sweep.json``.

    Raises
    ------
    InputError
        ``SWEEP_DIRECTORY`` if it is not one.
    """
    place = path / "sweep.json"
    try:
        found = json.loads(read_regular(place, most=MOST_BYTES))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        if not found["points"]:
            raise ValueError("no points")
        for row in recorded_points(found):
            if not isinstance(row["name"], str) or not isinstance(row["recipe"], Mapping):
                raise ValueError("a point without name or recipe")
            if not isinstance(row["settings"], Mapping):
                raise ValueError("a point without settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "SWEEP_DIRECTORY",
            f"sweep.json cannot be read ({error})",
            where=str(place),
            remedy="give the directory of a sweep",
        ) from error
    return dict(found)
