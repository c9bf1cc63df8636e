"""What `audit` says of datasets with known faults, and of sound ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.cli.main import main

LENGTHS = [60, 80, 50, 70, 90]


def columns(seed: int = 0) -> dict[str, Any]:
    """Smooth walks that begin anew with each episode."""
    generator = np.random.default_rng(seed)
    walks = []
    for length in LENGTHS:
        steps = generator.normal(0.02, 0.005, (length, 4))
        walks.append(generator.normal(0, 3, 4) + steps.cumsum(0))
    count = sum(LENGTHS)
    return {
        "observations": np.concatenate(walks).astype(np.float32),
        "actions": generator.uniform(-0.9, 0.9, (count, 1)).astype(np.float32),
        "rewards": generator.normal(size=count).astype(np.float32),
        "terminals": np.isin(np.arange(count), np.cumsum(LENGTHS) - 1),
    }


def make(folder: Path, data: dict[str, Any], **options: Any) -> Path:
    go.convert(go.from_arrays(data), folder, quiet=True, **options)
    return folder


def checks(folder: Path, **options: Any) -> dict[str, Any]:
    return {finding.check: finding for finding in go.audit(folder, **options).findings}


def test_a_sound_dataset(tmp_path: Path) -> None:
    page = go.audit(make(tmp_path / "data", columns()))
    assert page.findings == ()
    assert (page.episodes, page.steps) == (5, sum(LENGTHS))


def test_missing_boundaries_are_found(tmp_path: Path) -> None:
    data = columns()
    data["terminals"][sum(LENGTHS[:2]) - 1] = False
    found = checks(make(tmp_path / "data", data))
    assert list(found) == ["boundary"]
    assert found["boundary"].places == ((1, 80),)  # the step that begins the lost episode


def test_faults_of_columns(tmp_path: Path) -> None:
    data = columns()
    data["observations"][:, 1] = 7.0
    data["observations"][100, 2] = 1e6
    data["observations"][100, 3] = np.nan
    data["actions"] = (data["actions"] * 2).clip(-1, 1)
    found = checks(make(tmp_path / "data", data, allow_nonfinite=True))
    assert set(found) == {"constant", "clipped", "nonfinite"}
    assert found["constant"].places == ((1,),)
    assert found["nonfinite"].count == 1


def test_an_outlier_and_its_place(tmp_path: Path) -> None:
    data = columns()
    for name in ("observations", "actions", "rewards", "terminals"):
        data[name] = np.concatenate([data[name]] * 20)  # 7,000 steps: rare enough
    data["observations"][100, 2] = 1e6
    found = checks(make(tmp_path / "data", data))
    assert found["outlier"].places == ((1, 40),)
    assert found["repeated"].count == 99  # all but the episode with the outlier


def test_endings_bounds_and_shared_episodes(tmp_path: Path) -> None:
    data = columns()
    data["terminals"] = np.arange(sum(LENGTHS)) % 50 == 49
    data["actions"] *= 4
    folder = make(tmp_path / "data", data, environment="Pendulum-v1")
    other = make(tmp_path / "other", {k: v[:100] for k, v in data.items()})
    found = checks(folder, against=[other])
    assert found["ending"].count == 7
    assert found["bounds"].count == 1
    assert "Pendulum-v1 takes -2 to 2" in found["bounds"].what
    assert found["shared"].places == ((0,), (1,))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "data", columns())
    assert main(["audit", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == sum(LENGTHS)
    assert main(["audit", str(folder), "--against", str(folder), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "5 episodes of 5 are in" in text and "0, 1, 2, 3, 4" in text
    assert main(["audit", str(tmp_path / "none")]) == 2
