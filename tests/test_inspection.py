"""What inspect says, as JSON and as text."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.core.progress import Terminal
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.inspect import inspect, print_inspection, summary
from gear_offline.data.dataset.manifest import Manifest
from tests.support import ArraySource, hopper_columns, make_dataset, one_error


def text_of(document: dict[str, Any], *, width: int = 80, full: bool = True) -> str:
    out = io.StringIO()
    print_inspection(document, full=full, console=Terminal(file=out, width=width))
    return out.getvalue()


def summary_of(manifest: Manifest) -> str:
    return "\n".join(summary(manifest)) + "\n"


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return inspect(make_dataset(tmp_path, [4, 9, 2], shard_bytes=600).path)


def test_the_promised_keys(document: dict[str, Any]) -> None:
    promised = {
        *("format_version", "episodes", "steps", "columns", "statistics", "shards"),
        *("environment", "verified", "returns", "lengths", "source", "endings", "digests"),
    }
    assert promised <= set(document)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document["environment"]) == {"id", "reference_scores"}
    assert (document["episodes"], document["steps"]) == (3, 15)
    assert document["verified"] is True
    assert document["digests"]["checked"] == document["digests"]["blocks"] > 0
    assert document["endings"] == {"terminated": 2, "truncated": 1, "neither": 0}
    assert sum(shard["steps"] for shard in document["shards"]) == 15
    observations = document["columns"][0]
    assert observations["name"] == "observations" and observations["bytes"] == 15 * 11 * 4
    assert len(document["statistics"]["observations"]["mean"]) == 11


def test_text_shows_what_matters(document: dict[str, Any], tmp_path: Path) -> None:
    text = text_of(document)
    for word in (
        *("observations", "float32", "scalar", "Hopper-v5", "3234.3", "indicative only"),
        *("terminated", "truncated", "returns  mean", "lengths  mean"),
        *("3 shards", "checked, all match"),
    ):
        assert word in text, word
    assert document["returns"]["left_out"] == 0 and "left out" not in text
    assert max(map(len, text.splitlines())) <= 80
    unread = inspect(tmp_path / "dataset", verify=False)
    assert unread["verified"] is False and unread["digests"]["checked"] == 0
    assert "blocks unread" in text_of(unread)


def test_the_first_screen_has_24_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would take a line more
    columns = hopper_columns(9) | {f"infos/{name}": np.zeros((9, 40)) for name in "abcdefghij"}
    convert(ArraySource(columns, [4, 5]), Path("d"), quiet=True)
    text = text_of(inspect("d"), full=False)
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80
    assert "columns more" in text and "--full" in text and "infos/j" not in text


def test_every_column_name_survives_narrow_terminals(tmp_path: Path) -> None:
    columns = hopper_columns(3)
    name = "infos/a_long_name_that_nobody_wants_to_lose_in_a_narrow_terminal"
    columns[name] = np.zeros(3)
    convert(ArraySource(columns, [3]), tmp_path / "d", quiet=True)
    lines = text_of(inspect(tmp_path / "d"), width=60).splitlines()
    first_cells = "".join(line.split()[0] for line in lines if line.strip())
    assert first_cells.count(name) == 2  # in the table of columns and in that of statistics


def test_nonfinite_and_unknown_values_print_as_dashes(tmp_path: Path) -> None:
    columns = hopper_columns(3)
    columns["rewards"][:] = np.nan
    convert(ArraySource(columns, [3]), tmp_path / "d", allow_nonfinite=True, quiet=True)
    document = inspect(tmp_path / "d")
    assert document["statistics"]["rewards"]["mean"] is None
    assert document["returns"]["count"] == 0 and document["returns"]["left_out"] == 1
    text = text_of(document)
    assert "left out: 1 episode with a return that is NaN or infinite" in text
    assert "mean -, std -" in text
    assert "unknown" in text


def test_markup_and_control_characters_are_only_text(tmp_path: Path) -> None:
    odd = "a\x1b[2Jb"
    attributes: dict[str, Any] = {"note": "[red]x[/nonsense]", "nested": {"empty": {}, "deep": [1]}}
    attributes |= {"speed [m/s]": 3, "[/b]": 4, odd: odd, "left_out": {odd: odd}, "warnings": [odd]}
    source = ArraySource(hopper_columns(3), [3], attributes=attributes, environment_id=odd)
    object.__setattr__(source.info, "rule", odd)
    manifest = convert(source, tmp_path / "d", quiet=True)
    text = text_of(inspect(tmp_path / "d")) + summary_of(manifest)
    assert "speed [m/s]" in text and "[/b]" in text
    assert "[red]x[/nonsense]" in text and '"deep": [1]' in text
    assert "\x1b" not in text and text.count("a\\x1b[2Jb") >= 7


def test_many_warnings_and_datasets_left_out_stay_what_they_are(tmp_path: Path) -> None:
    attributes = {
        "warnings": [f"part {i}: {'odd ' * 40}" for i in range(30)],
        "left_out": {f"infos/{i}": "of another length " * 5 for i in range(90)} | {"a": "x" * 5000},
        "text": "x" * 5000,
    }
    source = ArraySource(hopper_columns(3), [3], attributes=attributes)
    lines: list[str] = []
    for kind, given in (("first", source), ("again", tmp_path / "first")):
        manifest = convert(given, tmp_path / kind, quiet=True)
        lines += summary_of(manifest).splitlines()
        assert all(len(json.dumps(v)) <= 4100 for v in manifest.source.attributes.values())
    warned = [line for line in lines if line.startswith("warning")]
    assert 40 < len(warned) < 60 and warned[0].startswith("warning: part 0: odd odd")
    assert warned[-1] == f"warning: and {31 - len(warned) // 2} more"
    odd = {"warnings": 5, "left_out": [1], "edits": "by hand"}
    source = ArraySource(hopper_columns(3), [3], attributes=odd)
    assert "warning: 5" in summary_of(convert(source, tmp_path / "odd", quiet=True))
    assert "edited: by hand" in summary_of(convert(tmp_path / "odd", tmp_path / "o", quiet=True))
    left_out = [line for line in lines if line.startswith("left out")]
    assert left_out[8] == "left out: others too, see inspect"


# what looks wrong in it: known faults, and none in what is sound -------------------------------


LENGTHS = [60, 80, 50, 70, 90]


def walks(seed: int = 0) -> dict[str, Any]:
    """Smooth walks that begin anew with each episode."""
    generator = np.random.default_rng(seed)
    parts = []
    for length in LENGTHS:
        steps = generator.normal(0.02, 0.005, (length, 4))
        parts.append(generator.normal(0, 3, 4) + steps.cumsum(0))
    count = sum(LENGTHS)
    return {
        "observations": np.concatenate(parts).astype(np.float32),
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
    """Also where actions reach the bounds themselves, and another column never changes."""
    data = walks() | {"infos/mass": np.ones(sum(LENGTHS), np.float32)}
    data["actions"][:2, 0] = -2.0, 2.0
    page = go.audit(make(tmp_path / "data", data, environment="Pendulum-v1"))
    assert page.findings == ()
    assert (page.episodes, page.steps) == (5, sum(LENGTHS))


def test_missing_boundaries_are_found(tmp_path: Path) -> None:
    data = walks()
    data["terminals"][sum(LENGTHS[:2]) - 1] = False
    found = checks(make(tmp_path / "data", data))
    assert list(found) == ["boundary"]
    assert found["boundary"].places == ((1, 80),)  # the step that begins the lost episode
    data = walks()
    seen, first = data["observations"], int(LENGTHS[0])
    data["next_observations"] = np.concatenate([seen[1:], seen[-1:]])
    data["next_observations"][first + 2] += 1e-3
    (unlike,) = go.audit(make(tmp_path / "next", data)).findings
    assert (unlike.check, unlike.places) == ("boundary", ((1, 3),))


def test_episodes_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and equal episodes are those of a dataset that is read at once."""
    rng, lengths = np.random.default_rng(0), [40, 25, 40, 40]
    parts = [rng.normal(scale=0.1, size=(n, 3)).cumsum(0).astype(np.float32) for n in lengths[:3]]
    rows = np.concatenate([*parts, parts[2]])
    rows[50:65] += 50.0  # from step 10 to the end of episode 1
    made = {"observations": rows, "actions": rows[:, :1], "next_observations": rows.copy()}
    made["next_observations"][:-1] = rows[1:]
    made["next_observations"][70] += 1.0
    made["terminals"] = np.isin(np.arange(len(rows)), np.cumsum(lengths) - 1)
    go.convert(go.from_arrays(made), tmp_path / "d", quiet=True)
    whole = go.audit(tmp_path / "d", against=[tmp_path / "d"])
    monkeypatch.setattr("gear_offline.analysis.audit.PIECE_BYTES", 300)
    assert go.audit(tmp_path / "d", against=[tmp_path / "d"]) == whole
    checks = {finding.check: finding for finding in whole.findings}
    assert checks["repeated"].places == ((2,), (3,)) and checks["shared"].count == 4
    jumps, unlike = (f for f in whole.findings if f.check == "boundary")
    assert (jumps.places, unlike.places) == (((1, 10),), ((2, 6),))


def test_a_sample_speaks_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of large data rows are read in part, which is said; facts of all are still of all."""
    rng, length, count = np.random.default_rng(0), 20, 300
    rows = rng.normal(scale=0.1, size=(count, length, 3)).cumsum(1).astype(np.float32)
    rows[7] = rows[291]  # far apart
    rows[251, 3, 1] = 1e6
    rows[range(0, count, 10), 10:] += 50.0  # no flag before step 10 of each tenth episode
    made: dict[str, Any] = {"observations": rows.reshape(-1, 3)}
    made["actions"] = made["observations"][:, :1]
    made |= {"rewards": rows[..., 0].ravel(), "terminals": np.arange(6000) % length == length - 1}
    folder = make(tmp_path / "d", made)
    whole = go.audit(folder)
    assert whole.steps_read == whole.steps == 6000
    monkeypatch.setattr("gear_offline.analysis.audit.MOST_BYTES", 25_600)
    monkeypatch.setattr("gear_offline.analysis.audit.RUNS", 25)
    page = go.audit(folder)
    assert 500 < page.steps_read <= 1200
    assert go.audit(folder, full=True) == whole
    every, sample = ({f.check: f for f in each.findings} for each in (whole, page))
    assert every["boundary"].count == 30 > sample["boundary"].count > 0
    assert {*sample["boundary"].places} <= {(n, 10) for n in range(0, count, 10)}
    assert sample["repeated"] == every["repeated"] and sample["repeated"].places == ((7,), (291,))
    assert every["outlier"].places == ((251, 3),)
    assert (sample["outlier"].what, sample["outlier"].count) == (every["outlier"].what, 1)
    monkeypatch.setattr("gear_offline.analysis.audit.COMPARED_BYTES", 1)
    cut = go.audit(folder)
    assert (cut.episodes_alike, cut.episodes_compared) == (2, 0)
    monkeypatch.setattr("gear_offline.analysis.audit.MOST_BYTES", 2_500)
    sound = go.audit(make(tmp_path / "s", walks()))
    sound.print()
    assert re.search(r"nothing looks wrong in the \d+ steps read\n", capsys.readouterr().out)
    assert sound.steps_read < sound.steps


def test_faults_of_columns(tmp_path: Path) -> None:
    data = walks()
    data["observations"][:, 1] = 7.0
    data["observations"][100, 2] = 1e6
    data["observations"][100, 3] = np.nan
    data["actions"] = (data["actions"] * 2).clip(-1, 1)
    found = checks(make(tmp_path / "data", data, allow_nonfinite=True))
    assert set(found) == {"constant", "clipped", "nonfinite"}
    assert found["constant"].places == ((1,),)
    assert found["nonfinite"].what == "1 value of observations is NaN or infinite"
    assert found["constant"].what == "1 element of observations never changes"
    data["observations"][:, 2], data["observations"][101, 3] = 7.0, np.inf
    found = checks(make(tmp_path / "two", data, allow_nonfinite=True))
    assert found["nonfinite"].what == "2 values of observations are NaN or infinite"
    assert found["constant"].what == "2 elements of observations never change"


def test_an_outlier_and_its_place(tmp_path: Path) -> None:
    data = walks()
    for name in ("observations", "actions", "rewards", "terminals"):
        data[name] = np.concatenate([data[name]] * 20)  # 7,000 steps: rare enough
    data["observations"][100, 2] = 1e6
    found = checks(make(tmp_path / "data", data))
    assert found["outlier"].places == ((1, 40),)
    assert found["repeated"].count == 99  # all but the episode with the outlier


def test_endings_bounds_and_shared_episodes(tmp_path: Path) -> None:
    data = walks()
    data["terminals"] = np.arange(sum(LENGTHS)) % 50 == 49
    data["actions"] *= 4
    folder = make(tmp_path / "data", data, environment="Pendulum-v1")
    other = make(tmp_path / "other", {k: v[:100] for k, v in data.items()})
    found = checks(folder, against=[other])
    assert found["ending"].count == 7
    assert found["bounds"].count == 1
    assert "Pendulum-v1 takes -2 to 2" in found["bounds"].what
    assert found["shared"].places == ((0,), (1,))
    rounded = {k: v.astype("f4") if v.dtype.kind == "f" else v for k, v in data.items()}
    assert checks(make(tmp_path / "f4", rounded), against=[folder])["shared"].count == 7
    go.convert(folder, tmp_path / "few", columns=["observations"], quiet=True)
    with one_error("COLUMN", "has observations float.*rewards float.*, .* actions float"):
        go.audit(folder, against=[tmp_path / "few"])


def test_an_unfinished_last_episode_and_one_episode_of_all(tmp_path: Path) -> None:
    data = walks()
    data["terminals"][-1] = False
    last = go.audit(make(tmp_path / "data", data)).findings[-1]
    assert "1 episode at the end is unfinished" in last.what and last.places == ((4,),)
    data["terminals"][:] = False
    findings = go.audit(make(tmp_path / "one", data)).findings
    first = next(finding for finding in findings if finding.check == "ending")
    assert "nothing ends it" in first.what and "--rule 'steps=N'" in first.remedy


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "data", walks())
    assert main(["audit", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == sum(LENGTHS)
    assert main(["audit", str(folder), "--against", str(folder), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "5 episodes of 5 are in" in text and "0, 1, 2, 3, 4" in text
    assert main(["audit", str(tmp_path / "none")]) == 2
