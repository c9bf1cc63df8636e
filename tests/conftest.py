"""Settings of the whole suite, and fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset that tests of training share; many have one of their own by this name."""
    from tests.training_support import tiny_data  # loads torch

    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def no_reports() -> Iterator[None]:
    """Leave out reports of single runs, which with their plots take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.report.write_report", lambda run, **_: Path(run))
        yield
