"""Worker processes that write shards: one interpreter each, JSON lines over pipes.

A worker opens the source itself.  It dies with its parent (the kernel sends the signal), so that a
killed conversion leaves nobody writing.  Run as ``python -m gear_offline.sources.shard_workers``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import numpy as np

from gear_offline.core.processes import die_with_parent, interrupts_kept_from_children
from gear_offline.dataset.manifest import ShardRecord
from gear_offline.dataset.shards import byte_view, digest, open_directory
from gear_offline.dataset.statistics import Moments
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.sources.base import Source
from gear_offline.sources.shard_job import Advance, Settings, ShardJob, ShardResult, write_shard

_KINDS = {kind.__name__: kind for kind in (GearError, InputError, UnavailableError)}


def write_shards(
    opened: tuple[str, str | None, Mapping[str, str]],
    source: Source,
    jobs: Sequence[ShardJob],
    settings: Settings,
    path: Path,
    workers: int,
    advance: Advance,
) -> list[ShardResult]:
    """Write `jobs` into directory `path` with up to `workers` processes; results in job order.

    `opened` is what `source` was opened with: what the user named, rule and names.

    Raises
    ------
    GearError
        What a worker met, or ``WORKER_FAILED`` when one died.
    """
    opening = {
        "uri": opened[0],
        "rule": opened[1],
        "names": dict(opened[2]),
        "episodes": _episodes_digest(source),
        "path": str(path),
        "columns": [c.name for c in settings.columns],
        "block_bytes": settings.block_bytes,
        "allow_nonfinite": settings.allow_nonfinite,
    }
    waiting: SimpleQueue[ShardJob] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    events: SimpleQueue[ShardResult | int | Exception] = SimpleQueue()
    results: dict[str, ShardResult] = {}
    with _processes(min(workers, len(jobs))) as processes:
        for process in processes:
            threading.Thread(
                target=_serve, args=(process, opening, waiting, events), daemon=True
            ).start()
        while len(results) < len(jobs):
            event = events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, int):
                advance(event)
            else:
                results[event.record.name] = event
    return [results[name] for name in sorted(results, key=lambda n: (len(n), n))]


@contextmanager
def _processes(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    # Safe path: a file named like a module of ours in the working directory is not imported.
    command = [sys.executable, "-P", "-m", "gear_offline.sources.shard_workers", str(os.getpid())]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        for _ in range(count):
            with interrupts_kept_from_children():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                )
                started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what a dead worker did not read cannot be written
                        pipe.close()


def _serve(
    process: subprocess.Popen[str],
    opening: dict[str, Any],
    waiting: SimpleQueue[ShardJob],
    events: SimpleQueue[ShardResult | int | Exception],
) -> None:
    """Feed one worker until no job waits; runs in a thread of the parent."""
    try:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("workers are started with pipes")
        print(json.dumps(opening), file=process.stdin, flush=True)
        while True:
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            print(json.dumps(vars(job)), file=process.stdin, flush=True)
            for line in process.stdout:
                event = _parse(line)
                events.put(event)
                if not isinstance(event, int):
                    break
            else:
                raise EOFError
    except (OSError, EOFError, ValueError, KeyError):
        events.put(
            GearError(
                "WORKER_FAILED",
                "a worker process died",
                remedy="look above for its message; memory may have run out: use fewer workers",
            )
        )


def _parse(line: str) -> ShardResult | int | Exception:
    value = json.loads(line)
    if "done" in value:
        return int(value["done"])
    if "error" in value:
        kind, code, what, where, remedy = value["error"]
        return _KINDS.get(kind, GearError)(code, what, where=where, remedy=remedy)
    return ShardResult(
        record=ShardRecord.from_json(value["record"]),
        moments={k: Moments.from_json(v) for k, v in value["moments"].items()},
        returns=np.asarray(value["returns"], np.float64),
    )


def _episodes_digest(source: Source) -> str:
    lengths = source.episodes.lengths
    return digest(byte_view(lengths)) + digest(
        json.dumps([c.to_json() for c in source.spec]).encode()
    )


def _work(requests: IO[str], replies: IO[str]) -> None:
    """Answer the parent's requests until it closes the pipe."""
    from gear_offline.sources import open_source

    def reply(**value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        opening = json.loads(requests.readline())
        directory = open_directory(Path(opening["path"]))
        with open_source(opening["uri"], rule=opening["rule"], names=opening["names"]) as source:
            if _episodes_digest(source) != opening["episodes"]:
                raise InputError("SOURCE_CHANGED", "the source changed while it was converted")
            settings = Settings(
                columns=tuple(source.spec[name] for name in opening["columns"]),
                block_bytes=opening["block_bytes"],
                allow_nonfinite=opening["allow_nonfinite"],
            )
            for line in requests:
                job = ShardJob(**json.loads(line))
                result = write_shard(
                    source, job, settings, directory=directory, advance=lambda n: reply(done=n)
                )()
                reply(
                    record=result.record.to_json(),
                    moments={k: v.to_json() for k, v in result.moments.items()},
                    returns=result.returns.tolist(),
                )
    except GearError as error:
        fields = (error.code, error.what, error.where, error.remedy)
        reply(error=[type(error).__name__, *fields])


def main() -> None:
    """Serve one parent, whose process id is the only argument."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends us
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with replies
    _work(sys.stdin, replies)


if __name__ == "__main__":
    main()
