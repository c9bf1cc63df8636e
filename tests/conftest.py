"""Settings of the whole suite, and fixtures of several files."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import no_picture

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

# A busy machine is slow, not wrong; fixtures that examples share are made so that they may.
allowed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("suite", deadline=None, suppress_health_check=allowed)
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """Let no garbage collection look at the modules again: a quarter of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test loses power; many would wait for the disk most of their time.  None writes home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def draw_picture() -> Iterator[Any]:
    """Leave out what takes most of the time of a small run: pictures, and parsing of all commands.

    Tests of pictures ask for `pictures`.
    """
    import typer.main

    from gear_offline.core import plots  # loads matplotlib

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        draw = plots.draw
        patch.setattr(plots, "draw", no_picture)
        yield draw


@pytest.fixture
def pictures(draw_picture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures as users get them."""
    monkeypatch.setattr("gear_offline.core.plots.draw", draw_picture)


@pytest.fixture(autouse=True)
def same_environments() -> Iterator[None]:
    """Put back environments that a test registers anew: the next test may need the old ones."""
    gymnasium = sys.modules.get("gymnasium")
    before = {} if gymnasium is None else dict(gymnasium.registry)
    yield
    if gymnasium is not None:
        gymnasium.registry.update(before)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels of the GPU, compiled for the CPU."""
    from tests.kernels_on_cpu import compile_kernels  # loads torch

    folder = tmp_path_factory.getbasetemp()
    return compile_kernels(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset that tests of training share; many have one of their own by this name."""
    from tests.training_support import tiny_data  # loads torch

    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def no_reports() -> Iterator[None]:
    """Leave out reports of single runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.runs.report.write_report", lambda run, **_: Path(run))
        yield


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin worker processes as forks that have torch loaded already."""
    from tests.forks import fork_workers

    fork_workers(monkeypatch)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    from gear_offline.runs.loop import train_run
    from tests.training_support import tiny_recipe

    return train_run(tiny_recipe(data), out=tmp_path_factory.mktemp("runs") / "whole", quiet=True)
