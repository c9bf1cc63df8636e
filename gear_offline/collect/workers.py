"""Processes that play episodes; the results do not depend on how many there are.

Workers are started afresh (``spawn``), so threads of the parent do no harm.  They exchange plans
and arrays with this process only.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gear_offline.collect.environment import EnvironmentFacts
from gear_offline.collect.rollout import Episode, EpisodePlan, EpisodeScore, Player
from gear_offline.core.closing import Closing
from gear_offline.core.processes import (
    die_with_parent,
    interrupts_kept_from_children,
    let_interrupts_end_this,
)
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import import_module_of

ResultT = TypeVar("ResultT")
_player: Player | None = None  # one per worker process, made by `_start`


def _start(environment_id: str, environments: int) -> None:
    global _player
    let_interrupts_end_this()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
    import_module_of(environment_id)
    _player = Player(environment_id, environments)


def _record(plans: list[EpisodePlan]) -> list[Episode]:
    assert _player is not None, "the pool's initializer makes the player"
    return list(_player.record(plans))


def _score(plans: list[EpisodePlan]) -> list[EpisodeScore]:
    assert _player is not None, "the pool's initializer makes the player"
    return _player.score(plans)


class Crew(Closing):
    """Plays plans in this process (``processes=1``) or in several; a context manager.

    Parameters
    ----------
    environment_id
        Gymnasium id.
    environments
        Environments that act as one batch, in each process.
    processes
        Worker processes; 1 means none, everything happens here.
    """

    def __init__(self, environment_id: str, *, environments: int, processes: int) -> None:
        self.processes, self.environments = processes, environments
        self._player = Player(environment_id, environments if processes == 1 else 1)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(environment_id, environments),
            )

    @property
    def facts(self) -> EnvironmentFacts:
        return self._player.facts

    def record(self, plans: Iterable[EpisodePlan]) -> Iterator[Episode]:
        """Yield the episodes of `plans` (maybe endless) in order; stop reading when enough."""
        if self._pool is None:
            yield from self._player.record(plans)
            return
        waiting = iter(plans)
        running: deque[Future[list[Episode]]] = deque()
        try:
            while True:
                while len(running) < 2 * self.processes:
                    chunk = list(itertools.islice(waiting, self.environments))
                    if not chunk:
                        break
                    with interrupts_kept_from_children():  # submitting may start one
                        running.append(self._pool.submit(_record, chunk))
                if not running:
                    return
                yield from _result(running.popleft())
        finally:
            for future in running:
                future.cancel()

    def score(self, plans: Sequence[EpisodePlan]) -> list[EpisodeScore]:
        """Return the scores of `plans` in order."""
        if self._pool is None:
            return self._player.score(plans)
        # One episode a task: lengths differ by a factor of 100, and the slowest worker counts.
        with interrupts_kept_from_children():
            futures = [self._pool.submit(_score, [plan]) for plan in plans]
        return [score for future in futures for score in _result(future)]

    def close(self) -> None:
        """End the workers."""
        self._player.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _result(future: Future[ResultT]) -> ResultT:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise GearError(
            "COLLECT_WORKER",
            "a worker process ended before its work",
            remedy="if collect() is called by a script, call it under"
            ' `if __name__ == "__main__":`; or use processes=1',
        ) from error
