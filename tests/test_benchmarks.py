"""The benchmarks run and print JSON; peers hand out the same windows; verdicts can fail."""

import json
import re
import shlex
import subprocess
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import benchmarks.__main__ as command
from benchmarks import common, draws, figures, growth, loader_peers, ogbench_page, rotate
from benchmarks import seeds as many_seeds
from benchmarks.parity import (
    OURS,
    RELEASED,
    PaperSampling,
    Settings,
    compare,
    measure,
    parse,
)
from gear_offline.batches.sampling import Facts, make_sampler
from gear_offline.core import system
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.loaders.loader import GearLoader
from tests.kernels_on_cpu import on_cpu
from tests.support import make_dataset

ON_A_CPU = ("loader", "load", "select", "save")  # of a few seconds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "STEPS", 20_000)
    monkeypatch.setattr(common, "EPISODES", 60)
    monkeypatch.setattr("benchmarks.loader.BATCH_SIZES", (8,))
    monkeypatch.setattr("benchmarks.loader_peers.FEW_STEPS", 5_000)
    monkeypatch.setattr("benchmarks.loader_peers.WORKERS", 0)
    monkeypatch.setattr("benchmarks.load.QUICK_STEPS", 20_000)
    monkeypatch.setattr("benchmarks.select.QUICK_SIZES", (10_000,))
    monkeypatch.setattr("benchmarks.select.QUICK_DRAWS", 1_000)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_benchmark_is_listed_and_prints_one_json_document(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    assert command.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert name in listed and "parity" not in listed
    monkeypatch.setattr("sys.argv", ["benchmarks", name, "--quick", "--json"])
    assert command.main() == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["benchmark"] == name and document["machine"]["cores"] >= 1
    assert document["results"] and all(isinstance(row, dict) for row in document["results"])
    common.print_document(document)


def test_a_figure_names_a_commit_that_has_all_of_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "select", "--json"])
    monkeypatch.setattr(command, "run_benchmark", lambda name, **_: {"benchmark": name})
    for told, code in (("1a2b3c4-dirty", 2), ("1a2b3c4", 0)):
        monkeypatch.setenv("GEAR_OFFLINE_COMMIT", told)
        system._commit.cache_clear()
        assert command.main() == code
    system._commit.cache_clear()
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {"commit": "1a2b3c4", "benchmark": "select"}
    assert streams.err.startswith("[USAGE]") and "differ from their commit" in streams.err


def test_work_grows_no_faster_than_the_data() -> None:
    for row in growth.run(quick=True)["results"]:
        assert row["exponent_of_operations"] <= 1.1, row


def test_who_draws_changes_no_batch(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common.write_rows(tmp_path / "d", 100, (2,), actions=1, episode_steps=50, shard_bytes=1 << 20)
    with on_cpu(kernels) as device:
        table = draws.Table.of(1_000, device)
        for strategy in draws.STRATEGIES:
            loaders = [
                table.loader(tmp_path / "d", sampler, who, 3)
                for who, sampler in table.samplers(strategy).items()
            ]
            for _ in range(3):
                one, other = map(next, loaders)
                assert one.segments.equal(other.segments)
                assert one.timesteps.equal(other.timesteps)
        monkeypatch.setattr(draws, "BLOCK_STEPS", 2)
        monkeypatch.setattr(draws, "QUICK_ITEMS", (500,))
        monkeypatch.setattr(draws, "QUICK_BATCHES", (2,))
        monkeypatch.setattr(draws, "SECONDS", 0.0)
        rows = draws.measure(device, quick=True)
    measured = {row["what"] for row in rows if row["strategy"] == "prioritized"}
    assert measured == {"batch", "weights", "update", "turn"}


def test_the_numpy_peer_gathers_what_the_loader_does() -> None:
    with common.hopper_like(quick=True) as data:
        loader = GearLoader(data.dataset, batch_size=32, context_length=20, device="cpu")
        batch = next(loader)
        episode, start = batch.segments.numpy().T
        gather = loader_peers.PlainGather(data, 20)
        first = data.offsets[episode] + start
        fields: Any = gather(first, start, data.offsets[episode + 1])
        names = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")
        for name, field in zip(names, fields, strict=True):
            mine = getattr(batch, name).numpy()
            np.testing.assert_allclose(field.numpy().reshape(mine.shape), mine, rtol=1e-6)


LENGTHS = (9, 2, 6)
SIZES: dict[str, Any] = {"batch_size": 8, "context_length": 4, "hidden_size": 8, "layers": 1}
SETTINGS = Settings(**SIZES, steps=2, learning_rate=1e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("parity"), LENGTHS)


def test_windows_of_the_paper_are_those_of_the_loader_on_real_steps(dataset: Dataset) -> None:
    paper = PaperSampling(dataset, SETTINGS, seed=0)
    options: dict[str, Any] = {"normalize_states": True, "returns_scale": SETTINGS.returns_scale}
    options |= {"padding": "left", "device": "cpu"}
    loader = GearLoader(dataset, batch_size=8, context_length=4, **options)
    padded = 0
    for step in range(10):
        batch = loader.batch_at(step)
        for row, (episode, start) in enumerate(batch.segments.tolist()):
            theirs = paper._window(episode, start)
            real = theirs["attention_mask"] > 0
            padded += int((~real).sum())
            for name, values in theirs.items():
                ours = batch.model_inputs()[name][row].numpy()[real]
                np.testing.assert_allclose(ours, values[real], 1e-5, 1e-6, err_msg=name)
            assert (theirs["actions"][~real] == -10.0).all()
    assert padded > 0
    lengths = paper.batch(4000)["attention_mask"].sum(1).numpy()
    # uniform over the 17 steps: a window is cut short at the last 3 starts of each episode
    for length, share in {1: 3 / 17, 2: 3 / 17, 3: 2 / 17, 4: 9 / 17}.items():
        deviation = (share * (1 - share) / 4000) ** 0.5
        assert abs(float((lengths == length).mean()) - share) < 5 * deviation, length


def test_verdict_tells_noise_from_a_difference() -> None:
    theirs = [1.0, 2.0, 3.0]
    assert compare([1.1, 1.9, 3.05], theirs)["within_seed_noise"] is True
    assert compare([1.5, 2.5, 3.49], theirs)["within_seed_noise"] is False
    assert compare([1.0], [2.0])["within_seed_noise"] is None
    # 30 pairs: t(29) = 2.04523
    many = np.tile([0.0, 2.0], 15)
    low, high = compare(many, np.zeros(30))["interval"]
    half = 2.04523 * (30 / 29) ** 0.5 / 30**0.5
    assert (low, high) == pytest.approx((1 - half, 1 + half), rel=1e-5)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("parity")
    small = replace(SETTINGS, steps=3, learning_rate=1e-4)
    data = make_dataset(folder, (30, 25, 40)).path
    words = [str(data), "--steps", "3", "--seeds", "2", "--episodes", "0"]
    words += ["--work", str(folder / "work"), "--out", str(folder / "found")]
    words += ["--recipe", "train.threads=1", "train.log_every=1", "model.hidden_size=8"]
    words += ["model.layers=1", "loader.batch_size=8", "loader.context_length=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.parity.settings_of", lambda options: small)
        patch.setattr("gear_offline.runs.report.write_report", lambda run, **_: Path(run))
        return measure(parse(words)), folder


def test_both_learners_are_measured(measured: tuple[dict[str, Any], Path]) -> None:
    document, folder = measured
    (found,) = document["datasets"].values()
    for kind in (OURS, RELEASED):
        assert [one["seed"] for one in found["runs"][kind]] == [0, 1]
    # three steps at a tiny rate from the same weights: nearly the same loss, but not the same
    pairs = zip(found["runs"][OURS], found["runs"][RELEASED], strict=True)
    for ours, theirs in pairs:
        assert ours["probe_loss"] == pytest.approx(theirs["probe_loss"], rel=0.01)
        assert ours["probe_loss"] != theirs["probe_loss"]
    assert json.loads((folder / "found.json").read_text()) == document
    assert document["settings"]["steps"] == 3 and document["settings"]["warmup_steps"] == 1


@pytest.mark.parametrize("effect", [0.0, 0.8])
def test_smaller_studies_have_the_power_of_the_noncentral_t(effect: float) -> None:
    values = stats.norm.ppf((np.arange(2_000) + 0.5) / 2_000) + effect
    pairs, edge = 10, stats.t.ppf(0.975, 9)
    power = 1 - stats.nct.cdf(edge, 9, effect * np.sqrt(pairs)) if effect else 0.025
    opposite = stats.norm.cdf(-effect * np.sqrt(pairs))
    # the sign of the truth does not matter; a setting twice has twice Holm's p
    found, _ = many_seeds.shares([-values, -values], pairs, studies=2_000)
    strict = stats.t.ppf(1 - 0.025 / 2, 9)
    corrected = stats.nct.sf(strict, 9, effect * np.sqrt(pairs)) if effect else 0.0125
    assert found["corrected"] == pytest.approx(corrected, abs=0.03)
    if effect:
        assert many_seeds.needed(effect) == 15  # 0.82; with 14 it is 0.79
    assert found["right"] == pytest.approx(power, abs=0.03)
    assert found["opposite"] == pytest.approx(opposite, abs=0.03) and found["wrong"] < 0.04


def test_pairs_of_a_study_are_of_one_seed() -> None:
    def outcome(label: str, seeds: list[int], values: list[float]) -> dict[str, Any]:
        final = {"values": values, "mean": 45.0, "half": 21.7}
        versus = {"low": 1.0, "high": 1.0, "holm_p": 0.01, "verdict": "higher"}
        return {"label": label, "seeds": seeds, "final": final, "versus": versus}

    seeds = list(range(10))
    base = outcome("a", seeds, [10.0 * seed for seed in seeds])
    better = outcome("b", seeds[::-1], [10.0 * s + 1 + s / 100 for s in seeds[::-1]])
    none = {"label": "c", "final": None}
    baseline, (row,) = many_seeds.study({"outcomes": [base, better, none]})
    assert baseline == base and row["pairs"] == 10
    assert (row["mean"], row["sd"]) == (pytest.approx(1.045), pytest.approx(0.0303, abs=1e-4))
    assert row["needed"] == [2, 2, 2] and row["studies"][5]["opposite"] == 0.0
    many_seeds.plot(base, [row])
    line = "| b | 45 ± 22 | **+1 (+1 to +1)** | 0.01 "
    line += "| 2 (2 to 2) | 100% | 100% | x 1.0 | 0.0% | 0.0% |"
    assert many_seeds.table(base, [row]).splitlines()[-1] == line


def test_models_are_compared_by_the_seeds_that_both_have() -> None:
    def study(**settings: list[float]) -> dict[str, Any]:
        seeds = range(3, 3 + len(next(iter(settings.values()))))
        outcomes = [
            {"label": label, "seeds": list(seeds), "final": {"values": values}}
            for label, values in settings.items()
        ]
        return {"outcomes": [*outcomes, {"label": "failed", "final": None}]}

    ours = study(all=[1.0, 2.0, 6.0, 100.0], other=[0.0] * 4)
    rows = many_seeds.beside({"dt": ours, "bc": study(all=[2.0, 4.0, 7.0])})
    assert [(row["model"], row["setting"]) for row in rows] == [("dt", "all"), ("bc", "all")]
    versus = rows[1]["versus"]
    test = stats.ttest_rel([2.0, 4.0, 7.0], [1.0, 2.0, 6.0])
    assert versus["pairs"] == 3 and versus["mean"] == pytest.approx(4 / 3)
    assert versus["holm_p"] == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    line = f"| bc | all | 3 | 4 ± 6 | 3 | +1 ({low:+,.0f} to {high:+,.0f}) | {test.pvalue:.2g} |"
    assert many_seeds.beside_table(rows).splitlines()[-1].replace("**", "") == line


def test_seeds_of_a_model_in_several_files_are_one_row() -> None:
    def row(seeds: list[int], shares: list[float]) -> dict[str, Any]:
        tasks = [[share, 0.0] for share in shares]
        of_each = {"seeds": seeds, "success": shares, "tasks": tasks, "loss": [0.5] * len(seeds)}
        return {"set": "maze", "model": "own", "steps": 1000, "curve": [], **of_each}

    documents = [{"results": [row([0, 1], [0.1, 0.2])]}, {"results": [row([2, 3], [0.3, 0.6])]}]
    (joined,) = rows = ogbench_page.join(documents)
    assert joined["seeds"] == [0, 1, 2, 3]
    half = stats.t.ppf(0.975, 3) * np.std([10, 20, 30, 60], ddof=1) / 2
    line = f"| maze | own | 1,000 | 4 | 30.0 ± {half:.1f} | 30 | 0 | 0.5000 ± 0.0000 |"
    assert ogbench_page.table(rows).splitlines()[-1] == line
    assert len(ogbench_page.plot(rows).axes) == 1


def test_readme_shows_the_figures_of_stored_documents() -> None:
    readme = Path("README.md").read_text(encoding="utf-8")
    for row in figures.readme_rows():
        assert row in readme


@pytest.mark.parametrize("path", sorted(Path("docs").rglob("*.json")), ids=str)
def test_stored_documents_name_their_code_and_a_command_of_today(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document, dates = json.loads(text), re.findall(r'"date": "([0-9-]+)"', text)
    assert dates and {"results", "datasets"} & document.keys()
    if "commit" not in document:  # of before that rule; its page says so
        assert max(dates) < "2026-11-29"
        page = next(page for page in path.parent.glob("*.md") if path.name in page.read_text())
        assert document["stored_by"] in page.read_text().split("\n## ")[0]
    commit = document.get("commit") or document["stored_by"]
    assert re.fullmatch(r"[0-9a-f]{8}|[0-9a-f]{40}", commit)
    if Path(".git").exists() and _git("rev-parse", "--is-shallow-repository") == "false":
        _git("merge-base", "--is-ancestor", commit, "HEAD")
    python, option, module, *words = shlex.split(document["command"])
    assert (python, option) == ("python", "-m")
    assert words[0] in common.names() if module == "benchmarks" else find_spec(module)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], check=True, text=True, capture_output=True
    ).stdout.strip()


def test_commands_of_benchmarks_in_pages_exist() -> None:
    pages = [Path("README.md"), Path("CONTRIBUTING.md"), *Path("docs").rglob("*.md")]
    known = {*common.names(), "figures", "NAME"}
    for page in pages:
        found = re.findall(r"-m benchmarks ([a-z_A-Z]+)", page.read_text(encoding="utf-8"))
        assert set(found) <= known, page


def test_a_rotation_takes_any_step_of_one_file_at_a_time() -> None:
    lengths, files = np.array([3, 1, 4, 2, 5]), np.array([0, 0, 7, 7, 9])  # of episodes
    columns = {"file": files.repeat(lengths)}
    facts = Facts(episodes=EpisodeIndex(lengths), column=columns.__getitem__)
    sampler = make_sampler(rotate.rotation, facts, every=2)
    steps = [(f, e, t) for e, f in enumerate(files) for t in range(lengths[e])]
    for at, file in enumerate((0, 0, 7, 7, 9, 9, 0)):
        drawn = sampler.sample(3, at, 1, 4000)
        counts = Counter(zip(drawn.episodes[0], drawn.starts[0], strict=True))
        own = [(e, t) for f, e, t in steps if f == file]
        assert set(counts) == set(own) and (drawn.probability == 1 / len(own)).all()
        assert stats.chisquare([counts[step] for step in own]).pvalue > 1e-3
