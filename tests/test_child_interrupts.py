"""Ctrl-C reaches every process of a terminal: those that we start leave it to us from the start."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from gear_offline.collect.rollout import EpisodePlan
from gear_offline.collect.workers import Crew
from gear_offline.core.processes import interrupts_kept_from_children


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
