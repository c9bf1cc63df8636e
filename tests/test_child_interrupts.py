"""Ctrl-C reaches every process of a terminal: those that we start leave it to us from the start."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from gear_offline.collect.rollout import EpisodePlan
from gear_offline.collect.workers import Crew
from gear_offline.core.processes import interrupts_kept_from_children
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep import processes as sweep_processes


class Started(OSError):
    """Instead of a process."""


def is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_interrupts_are_kept_from_processes_that_are_started_here() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts_kept_from_children():
        assert is_blocked()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_players_are_started_without_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> None:
        raise Started(is_blocked())

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    plan: Any = EpisodePlan
    with Crew("CartPole-v1", environments=1, processes=2) as crew:
        for play in (lambda: list(crew.record([plan])), lambda: crew.score([plan])):
            with pytest.raises(Started) as caught:
                play()
            assert caught.value.args == (True,) and not is_blocked()


def test_a_run_that_had_not_begun_when_its_sweep_was_stopped_is_no_error() -> None:
    """SIGTERM ends a worker that still loads its modules; only without it the worker is lost."""
    for asked in (True, False):
        worker = sweep_processes.Worker({}, threads=1)
        try:
            if asked:
                worker.interrupt()
            else:
                worker._process.terminate()
            error = worker.answer()
        finally:
            worker.close()
        assert isinstance(error, TrainingInterrupted) is asked
        assert error is not None and error.code == (
            "TRAIN_INTERRUPTED" if asked else "SWEEP_WORKER"
        )
