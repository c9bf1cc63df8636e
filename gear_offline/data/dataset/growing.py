"""A dataset that grows while a learner trains on it: pieces are admitted, one after the other.

Actors append pieces to the folder ``incoming``, where each appears by a rename, a shard of whole
episodes with a digest of its bytes in its name (`gear_offline.Appender`).  A learner admits
them between two of its steps: it links a piece behind the shards that are there, adds a line to
``admissions.jsonl``, and removes the piece.  Killed at any instant, it has admitted a piece wholly
or not at all.

As far as the lines go they decide what is admitted when, so that a resumed or repeated run sees the
same data at every step.  Only from the last line on new pieces are admitted.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from gear_offline.core.files import (
    Closing,
    open_regular,
    remove_leftovers,
    sync_directory,
    take_lock,
    write_all,
    writing,
)
from gear_offline.core.text import count_text, say, size_text
from gear_offline.core.types import Array, Float64Array
from gear_offline.data.dataset.dataset import (
    Dataset,
    grow_dataset,
    view_episodes,
    with_shards,
)
from gear_offline.data.dataset.manifest import (
    ADMISSIONS_NAME,
    Admission,
    Endings,
    Manifest,
    ShardRecord,
    encode_admissions,
    read_admissions,
    shard_name,
)
from gear_offline.data.dataset.schema import EpisodeIndex, fold_episodes
from gear_offline.data.dataset.shard import (
    DIGEST_CHARS,
    EPISODE_COLUMNS,
    BlockDigests,
    byte_view,
    damage_error,
    digest,
    encode_header,
    plan_tensors,
)
from gear_offline.data.dataset.statistics import Moments
from gear_offline.errors import NO_SPACE, GearError, InputError

INCOMING, REFUSED = "incoming", "refused"
PIECE_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{32}\.safetensors")
MAX_PIECE_BYTES = 2 << 30  # it is read at once
POLL_SECONDS = 0.02


class GrowingDataset(Closing):
    """The data of a learner that trains while actors append; a context manager.

    It begins with a `dataset` as it was converted; one that is verified stays so.
    It `admits` behind the last line, as one process at a time may, or else follows the lines only.
    `check` raises `InputError` for a piece that does not fit the learner, `check_whole` for a
    dataset that has grown by it.  Its statistics stay those of the beginning.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        admits: bool = True,
        check: Callable[[Dataset], None] = lambda piece: None,
        check_whole: Callable[[Dataset], object] = lambda dataset: None,
        quiet: bool = False,
    ) -> None:
        frozen = dataset.manifest.replace_fields(statistics=dict(dataset.statistics))
        self.dataset = replace(dataset, manifest=frozen, frozen=True)  # now
        self.admissions = 0  # that it has
        self._path, self._check, self._check_whole = dataset.path, check, check_whole
        self._quiet, self._passed_over = quiet, set[str]()
        self._log = self._hold() if admits else -1
        try:
            self._lines, self._seal, self._end = read_admissions(self._path)
            self._admitted = {line.piece for line in self._lines}
            if admits:  # remove half a line, and what killed actors left
                with writing(self._path):
                    ends = (self._path / ADMISSIONS_NAME).read_bytes().rfind(b"\n") + 1
                    os.ftruncate(self._log, ends)
                    if (self._path / INCOMING).is_dir():
                        remove_leftovers(self._path / INCOMING)
        except BaseException:
            self.close()
            raise

    def _hold(self) -> int:
        """Open the lines for writing, which no other process may; return the descriptor."""
        with writing(self._path):
            log = take_lock(self._path / ADMISSIONS_NAME, os.O_APPEND)
            sync_directory(self._path)
        if log < 0:
            problem, remedy = "another run grows this dataset", "wait for it, or copy the dataset"
            raise InputError("RUN_LOCKED", problem, str(self._path), remedy)
        return log

    def _waiting(self) -> list[Path]:
        """Return the files among the pieces, in the order of names."""
        folder = self._path / INCOMING
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return [folder / n for n in names if not n.startswith(".") and n not in self._passed_over]

    def go_to(self, step: int) -> Dataset:
        """Return the dataset as it was before anything was admitted at `step` or later."""
        return self.follow(bisect_left(self._lines, step, key=attrgetter("step")))

    def is_open(self, step: int) -> bool:
        """True if what is appended now is admitted at `step`: no line says what is."""
        return self._log >= 0 and self.last_step < step

    @property
    def last_step(self) -> int:
        """The learner's step of the last line; -1: there is none."""
        return self._lines[-1].step if self._lines else -1

    def follow(self, admissions: int) -> Dataset:
        """Return the dataset with that many admissions, which another process may have written."""
        if len(self._lines) < admissions:
            lines, self._seal, self._end = read_admissions(self._path, self._end, self._seal)
            self._lines += lines
        if len(self._lines) < admissions:
            problem = f"{len(self._lines):,} pieces are admitted, the run had {admissions:,}"
            remedy = "bring the dataset back as it was, or train into another directory"
            raise InputError("DATA_MISMATCH", problem, str(self._path), remedy)
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
        missing: Callable[[Dataset], str | None] = lambda dataset: None,
        timeout: float = 0.0,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Dataset:
        """Admit the pieces due before the learner's `step`; return the dataset.

        As far as there are lines, it repeats them.  Behind the last one, it admits pieces up to the
        first whose episodes `may_admit` refuses behind so many others of this look.  As long as
        something is `missing` ("3 episodes (why)"), it waits for more, for `timeout` seconds
        (``WORKER_LOST``) or until `is_stopped`.  On a full disk it neither admits nor waits.
        """
        self.follow(bisect_right(self._lines, step, key=attrgetter("step")))
        if self._log < 0 or self.admissions < len(self._lines):
            return self.dataset
        deadline, waits, first = time.monotonic() + timeout, False, len(self.dataset)
        while (
            self._look(step, may_admit) and (problem := missing(self.dataset)) and not is_stopped()
        ):
            if not waits:
                self._say(step, f"waiting for {problem}")
            if time.monotonic() > deadline:
                problem = f"step {step:,} has waited {timeout:g} s for {problem}"
                remedy = "start actors: gear-offline act RUN; then go on with --resume"
                raise GearError("WORKER_LOST", problem, str(self._path), remedy)
            waits = True
            time.sleep(POLL_SECONDS)
        if (count := len(self.dataset) - first) > 0:
            mean = self.dataset.returns[first:].mean()
            self._say(step, f"{count_text(count, 'episode')} admitted, mean return {mean:,.1f}")
        return self.dataset

    def _say(self, step: int, message: str) -> None:
        say(f"step {step:,}: {message}", quiet=self._quiet)

    def _look(self, step: int, may_admit: Callable[[int, int], bool]) -> bool:
        """Admit pieces that are there; return whether there is room on the disk."""
        first = len(self.dataset)
        with writing(self._path):
            try:
                count = self._admit(step, first, may_admit)
                for _ in range(count):
                    self._admit(step, first, may_admit, most=1)
                for number in range(count + 1):  # links of what was not admitted
                    name = shard_name(len(self.dataset.manifest.shards) + number)
                    (self._path / name).unlink(missing_ok=True)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._say(step, f"the disk of {self._path} is full, nothing is admitted")
                return False
        return True

    def _admit(
        self, step: int, first: int, may_admit: Callable[[int, int], bool], most: int | None = None
    ) -> int:
        """Admit at most `most` pieces; return the number of those that do not fit together."""
        lines, number = list[Admission](), len(self.dataset.manifest.shards)
        behind = len(self.dataset) - first
        for path in self._waiting():
            if (piece := self._fitting(path, number + len(lines))) is None:
                continue
            if not may_admit(len(piece), behind):
                break
            manifest = piece.manifest
            line = Admission(
                step=step, piece=path.name, endings=manifest.endings, shards=manifest.shards
            )
            lines.append(line)
            behind += len(piece)
            if len(lines) == most:
                break
        if not lines:
            return 0
        try:
            self._check_whole(grow_dataset(self.dataset, lines))
        except InputError as error:
            if len(lines) > 1:
                return len(lines)
            self._put_aside(self._path / INCOMING / lines[0].piece, error)
            return 0
        self._write(lines)
        self.follow(len(self._lines))
        return 0

    def _fitting(self, path: Path, number: int) -> Dataset | None:
        """Open a piece, linked as the shard of a number; put aside a piece that does not fit."""
        try:
            if path.name in self._admitted:  # by a learner that was killed then
                path.unlink()
                return None
            piece = open_piece(path, self._path / shard_name(number), self.dataset.manifest)
            self._check(piece)
            member = self.dataset.member  # what is held out does not count
            return view_episodes(piece, np.flatnonzero(member(piece, 0))) if member else piece
        except FileNotFoundError:
            return None  # it has gone
        except (InputError, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            self._put_aside(path, error)
            return None

    def _put_aside(self, path: Path, why: Exception) -> None:
        """Move a piece to the folder `refused` under a new name, or else pass it over."""
        target = self._path / REFUSED / f"{secrets.token_hex(4)}-{path.name[-50:]}"
        try:
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            done = f"moved to {target}"
        except OSError as error:
            self._passed_over.add(path.name)
            done = f"left there ({error.strerror})"
        say(f"refused, and {done}: {why}", quiet=self._quiet)

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
        self._lines += lines
        self._seal, self._end = seal, self._end + len(encoded)
        for line in lines:
            self._admitted.add(line.piece)
            with suppress(OSError):  # the next look says why
                (self._path / INCOMING / line.piece).unlink()

    def close(self) -> None:
        """Release the lock, so that another process may grow the dataset."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def too_large(size: int, where: Path) -> InputError:
    """Return the error of a piece that no learner would admit."""
    problem = f"a piece of {size_text(size)}, {size_text(MAX_PIECE_BYTES)} are the most"
    return InputError("SOURCE_LAYOUT", problem, str(where), "append fewer episodes at a time")


def piece_returns(rewards: Array | None, episodes: EpisodeIndex) -> Float64Array:
    """Return (E,) sums of rewards; NaN where the data have none."""
    if rewards is None or rewards.size != episodes.steps:
        return np.full(episodes.episodes, np.nan)
    returns = np.zeros(episodes.episodes)
    fold_episodes(np.add, returns, episodes.offsets, rewards.reshape(-1).astype(np.float64), 0)
    return returns


def open_piece(path: Path, shard: Path, manifest: Manifest) -> Dataset:
    """Read a piece once, and link the very file that was read as `shard`.

    ``DATASET_DAMAGED``; ``COLUMN`` if it is laid out otherwise.
    """
    if not PIECE_NAME.fullmatch(path.name):
        raise damage_error("no name that go.Appender gives", path)
    with open(open_regular(path, links=False), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size > MAX_PIECE_BYTES:
            raise too_large(status.st_size, path)
        content = file.read(status.st_size)
        shard.unlink(missing_ok=True)  # of an admission that a kill broke off
        os.link(path, shard, follow_symlinks=False)
        if not os.path.samestat(status, os.lstat(shard)):
            raise FileNotFoundError(f"{path} is another file now: the next look's")
    if digest(content) != path.stem[-DIGEST_CHARS:]:
        raise damage_error("data do not match their digest", path)
    header, rows = b"", dict[str, Array]()
    first, lengths = manifest.columns[0].name, EPISODE_COLUMNS[0].name
    with suppress(SafetensorError, KeyError, TypeError, UnicodeDecodeError):
        rows = safetensors.numpy.load(content)
        counts = {"episodes": len(rows[lengths]), "steps": len(rows[first])}
        header = encode_header(plan_tensors(manifest.spec.columns, **counts))
    if not header or not content.startswith(header) or not all(counts.values()):
        columns = ", ".join(map(str, manifest.columns))
        problem = f"its columns are not those of the dataset: {columns}"
        raise InputError("COLUMN", problem, str(path), "append it with go.Appender")
    digests, statistics = {}, {}
    for name, values in rows.items():
        blocks = BlockDigests(manifest.block_bytes)
        blocks.update(byte_view(values))
        digests[name] = blocks.finish()
    for column in manifest.columns:
        moments = Moments(rows[column.name].shape[1:])
        moments.update(rows[column.name])
        statistics[column.name] = moments.result()
    ends = Endings(**{key: int(rows[f"episode_{key}"].sum()) for key in Endings.model_fields})
    seal = {"header_digest": digest(header), "digests": digests}
    sizes = {"bytes": len(content), "header_bytes": len(header)}
    record = ShardRecord.model_validate({"name": shard.name, **counts, **sizes, **seal})
    piece_manifest = manifest.replace_fields(
        **counts, statistics=statistics, endings=ends, shards=[record]
    )
    piece = with_shards(shard.parent, piece_manifest)
    _ = piece.histories  # refuses an episode of several
    returns = piece_returns(rows.get("rewards"), piece.episodes)
    if not np.array_equal(returns, piece.returns, equal_nan=True):
        raise damage_error("returns are not the sums of its rewards", path)
    return piece
