"""A dataset that grows while a learner trains on it: pieces are admitted, one after the other.

Actors append pieces to the folder ``incoming``, where each appears by a rename, a shard of whole
episodes with a digest of its bytes in its name (`gear_offline.convert.append`).  A learner admits
them between two of its steps: it links a piece behind the shards that are there, adds a line to
``admissions.jsonl``, and removes the piece.  Killed at any instant, it has admitted a piece wholly
or not at all.

As far as the lines go they decide what is admitted when, so that a resumed or repeated run sees the
same data at every step.  Only from the last line on new pieces are admitted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from gear_offline.core.closing import Closing
from gear_offline.core.files import remove_leftovers, sync_directory, try_lock, write_all, writing
from gear_offline.core.text import count_text, say
from gear_offline.core.types import Array
from gear_offline.dataset.dataset import Dataset, grow_dataset, open_dataset, with_shards
from gear_offline.dataset.manifest import (
    ADMISSIONS_NAME,
    Admission,
    Endings,
    Manifest,
    ShardRecord,
    encode_admissions,
    read_admissions,
    shard_name,
)
from gear_offline.dataset.shard import (
    DIGEST_CHARS,
    EPISODE_COLUMNS,
    BlockDigests,
    byte_view,
    damaged,
    digest,
    encode_header,
    open_member,
    plan_tensors,
)
from gear_offline.dataset.statistics import Moments
from gear_offline.errors import NO_SPACE, GearError, InputError

INCOMING, REFUSED = "incoming", "refused"
POLL_SECONDS = 0.02


class GrowingDataset(Closing):
    """The data of a learner that trains while actors append; a context manager.

    It begins with `path`, or the dataset there, as it was converted; one that is verified stays so.
    It `admits` behind the last line, as one process at a time may, or else follows the lines only.
    `check` raises `InputError` for a piece that does not fit the learner.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Dataset,
        *,
        admits: bool = True,
        check: Callable[[Dataset], None] = lambda piece: None,
        quiet: bool = False,
    ) -> None:
        if not isinstance(path, Dataset):
            path = open_dataset(path, verify=False, admissions=0)
        self.dataset, self.admissions = path, 0  # at present, and how many it has
        self._path, self._check, self._quiet = path.path, check, quiet
        self._log = self._hold() if admits else -1
        try:
            self._lines, self._seal = read_admissions(self._path)
            if admits:
                self._finish_last()
        except BaseException:
            self.close()
            raise

    @property
    def _admits(self) -> bool:
        """Whether this process may go on behind the last line."""
        return self._log >= 0

    def _hold(self) -> int:
        """Open the lines for writing, which no other process may; return the descriptor."""
        with writing(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            log = os.open(self._path / ADMISSIONS_NAME, flags, 0o644)
            sync_directory(self._path)
            is_taken = try_lock(log) is False
        if is_taken:
            os.close(log)
            what, remedy = "another run grows this dataset", "wait for it, or copy the dataset"
            raise InputError("RUN_LOCKED", what, str(self._path), remedy)
        return log

    def _finish_last(self) -> None:
        """Do what a killed learner left undone: half a line, or a piece that was admitted."""
        with writing(self._path):
            ends = (self._path / ADMISSIONS_NAME).read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._log, ends)
            admitted = {line.piece for line in self._lines}
            for piece in self._pieces():
                if piece.name in admitted:
                    piece.unlink(missing_ok=True)
            if (self._path / INCOMING).is_dir():
                remove_leftovers(self._path / INCOMING)

    def _pieces(self) -> list[Path]:
        """Return the pieces that are there, in the order of their names."""
        folder = self._path / INCOMING
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return [folder / name for name in names if not name.startswith(".")]

    def go_to(self, step: int) -> Dataset:
        """Return the dataset as it was before anything was admitted at `step` or later."""
        return self.follow(sum(line.step < step for line in self._lines))

    def follow(self, admissions: int) -> Dataset:
        """Return the dataset with so many admissions, which another process may have written."""
        if len(self._lines) < admissions:
            self._lines, self._seal = read_admissions(self._path)
        if admissions > self.admissions:
            larger = grow_dataset(self.dataset, self._lines[self.admissions : admissions])
            self.dataset = larger.verify() if self.dataset.verified else larger  # the new shards
            self.admissions = admissions
        return self.dataset

    def admit(
        self,
        step: int,
        *,
        may_admit: Callable[[int, int], bool] = lambda episodes, behind: True,
        missing: Callable[[Dataset], str] = lambda dataset: "",
        timeout: float = 0.0,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Dataset:
        """Admit what is to be admitted before the learner's `step`; return the dataset.

        As far as there are lines, what they say.  Behind the last one, the pieces that are there,
        up to the first whose episodes `may_admit` refuses behind so many others of this look; and
        those that come as long as something is `missing` ("3 episodes (why)"), for `timeout`
        seconds (``WORKER_LOST``) or until `is_stopped`.  On a full disk nothing is admitted, nor
        waited for.
        """
        self.follow(sum(line.step <= step for line in self._lines))
        if not self._admits or self.admissions < len(self._lines):
            return self.dataset
        deadline, waits, first = time.monotonic() + timeout, False, len(self.dataset)
        while self._look(step, may_admit) and (what := missing(self.dataset)) and not is_stopped():
            if not waits:
                self._say(step, f"waiting for {what}")
            if time.monotonic() > deadline:
                what = f"step {step:,} has waited {timeout:g} s for {what}"
                remedy = "start actors: gear-offline act RUN; then go on with --resume"
                raise GearError("WORKER_LOST", what, str(self._path), remedy)
            waits = True
            time.sleep(POLL_SECONDS)
        if (count := len(self.dataset) - first) > 0:
            mean = self.dataset.returns[first:].mean()
            self._say(step, f"{count_text(count, 'episode')} admitted, mean return {mean:,.1f}")
        return self.dataset

    def _say(self, step: int, what: str) -> None:
        say(f"step {step:,}: {what}", quiet=self._quiet)

    def _look(self, step: int, may_admit: Callable[[int, int], bool]) -> bool:
        """Admit pieces that are there; return whether there is room on the disk."""
        with writing(self._path):
            try:
                lines, number, behind = list[Admission](), len(self.dataset.manifest.shards), 0
                for path in self._pieces():
                    piece = self._fitting(path)
                    if piece is None:
                        continue
                    if not may_admit(len(piece), behind):
                        break
                    lines.append(self._link(path, piece, step, number + len(lines)))
                    behind += len(piece)
                if lines:
                    self._write(lines)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._say(step, f"the disk of {self._path} is full, nothing is admitted")
                return False
        self.follow(len(self._lines))
        return True

    def _fitting(self, path: Path) -> Dataset | None:
        """Open a piece; put one aside that is damaged or does not fit."""
        try:
            piece = read_piece(path, self.dataset.manifest)
            self._check(piece)
            return piece
        except InputError as error:
            place = self._path / REFUSED
            place.mkdir(exist_ok=True)
            path.rename(place / path.name)
            say(f"refused, and moved to {place / path.name}: {error}", quiet=self._quiet)
            return None

    def _link(self, path: Path, piece: Dataset, step: int, number: int) -> Admission:
        """Make a piece the shard of a number; return the line that admits it."""
        name = shard_name(number)
        (self._path / name).unlink(missing_ok=True)  # of an admission that a kill broke off
        os.link(path, self._path / name)
        shards = [shard.model_copy(update={"name": name}) for shard in piece.manifest.shards]
        endings = piece.manifest.endings
        return Admission(step=step, piece=path.name, endings=endings, shards=shards)

    def _write(self, lines: Sequence[Admission]) -> None:
        """Make links and lines durable, all or none, then remove the pieces."""
        sync_directory(self._path)
        encoded, seal = encode_admissions(lines, self._seal)
        before = os.fstat(self._log).st_size
        try:
            write_all(self._log, encoded)
            os.fsync(self._log)
        except OSError:
            os.ftruncate(self._log, before)
            raise
        self._lines, self._seal = [*self._lines, *lines], seal
        for line in lines:
            (self._path / INCOMING / line.piece).unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process grow the dataset."""
        if self._admits:
            os.close(self._log)
            self._log = -1


def read_piece(path: Path, manifest: Manifest) -> Dataset:
    """Return a piece as a dataset; ``DATASET_DAMAGED``, ``COLUMN`` if it is laid out otherwise."""
    with open(open_member(path), "rb") as file:
        content = file.read()
    if digest(content) != path.stem[-DIGEST_CHARS:]:
        raise damaged("data do not match their digest", path)
    header, rows = b"", dict[str, Array]()
    with suppress(SafetensorError, KeyError, TypeError, UnicodeDecodeError):
        rows = safetensors.numpy.load(content)
        steps, episodes = (
            len(rows[name]) for name in (manifest.columns[0].name, EPISODE_COLUMNS[0].name)
        )
        header = encode_header(plan_tensors(manifest.spec.columns, steps=steps, episodes=episodes))
    if not header or not content.startswith(header) or not steps or not episodes:
        columns, remedy = ", ".join(map(str, manifest.columns)), "append it with go.Appender"
        what = f"its columns are not those of the dataset: {columns}"
        raise InputError("COLUMN", what, str(path), remedy)
    digests, statistics = {}, {}
    for name, part in rows.items():
        blocks = BlockDigests(manifest.block_bytes)
        blocks.update(byte_view(part))
        digests[name] = blocks.finish()
    for column in manifest.columns:
        moments = Moments(rows[column.name].shape[1:])
        moments.update(rows[column.name])
        statistics[column.name] = moments.result()
    ends = Endings(**{key: int(rows[f"episode_{key}"].sum()) for key in Endings.model_fields})
    counts: dict[str, Any] = {"episodes": episodes, "steps": steps}
    record = ShardRecord.model_construct(  # under a name that is not yet a shard's
        **counts,
        name=path.name,
        bytes=len(content),
        header_bytes=len(header),
        header_digest=digest(header),
        digests=digests,
    )
    own = manifest.replaced(**counts, statistics=statistics, endings=ends, shards=[record])
    return with_shards(path.parent, own)
