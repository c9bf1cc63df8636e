"""A spike of the loss: which data made it, and a run without them."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.cli.main import main
from gear_offline.models.base import ModelSizes
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.training.learner import Learner
from gear_offline.training.stack import why_not_stacked
from tests.support import Patch, hopper_columns, one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt, tiny_recipe

pytestmark = pytest.mark.usefixtures("whole", "no_reports")
QUIET = ("evaluate.episodes=0", "train.keep_checkpoints=9")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """The segments of each step's batch, by step."""
    batches: dict[int, Any] = {}
    take = Learner.begin_step

    def noting(self: Learner) -> Any:
        batch = take(self)
        batches[self.step] = batch.segments.numpy().copy()
        return batch

    monkeypatch.setattr(Learner, "begin_step", noting)
    yield batches


def test_a_run_begins_with_a_checkpoint_of_another_and_skips(
    data: Path, tmp_path: Path, taken: dict[int, Any], monkeypatch: Patch
) -> None:
    before = train_run(tiny_recipe(data, *QUIET), out=tmp_path / "run", quiet=True)
    whole, seen = learnt(before), dict(taken)
    with one_error("USAGE", "name a run"):
        go.train("paper", {"data.path": str(data)}, checkpoint=5)
    with one_error("RUN_NOT_FOUND", "there are: 5, 10, 15, 20"):
        go.train(str(before), checkpoint=6)
    with one_error("RUN_MISMATCH", r"train\.skip was \[\] when the run began and is \[\[4, 9\]\]"):
        go.train(str(before), {"train.skip": [[4, 9]]}, checkpoint=5, quiet=True)
    with one_error("RUN_MISMATCH", "but 20 steps are done"):
        go.train(str(before), {"train.steps": 19}, checkpoint="last", quiet=True)
    same = go.train(str(before), checkpoint=5, out=tmp_path / "same", quiet=True)
    assert learnt(same.path) == whole, "nothing is changed"
    taken.clear()
    skipping = {"train.skip": [[8, 10], [14, 14]]}
    run = go.train(str(before), skipping, checkpoint=5, quiet=True)
    assert run.path == tmp_path / "run-from-5" and run.steps == 20
    assert learnt(before) == whole
    assert learnt(run.path)["metrics"][:2] == whole["metrics"][:2]
    left = [*range(5, 8), *range(11, 14), *range(15, 20)]
    for step, batch in zip(range(5, 16), left, strict=True):
        np.testing.assert_array_equal(taken[step], seen[batch])
    with one_error("OUTPUT_EXISTS"):
        go.train(str(before), skipping, checkpoint=5, quiet=True)

    def kill(source: str, place: str) -> None:
        raise RuntimeError("as kill -9 does, before the first file is copied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", partial(shutil.copytree, copy_function=kill))
        with pytest.raises(RuntimeError):
            go.train(str(before), checkpoint=5, out=tmp_path / "killed", quiet=True)
    with one_error("OUTPUT_EXISTS", "holds no run"):  # and does not begin at step 0
        go.train(str(before), out=tmp_path / "killed", resume=True, quiet=True)
    with one_error("USAGE", "resume that other run without it"):
        go.train(str(before), checkpoint=5, resume=True)
    assert go.train(run, {"train.steps": 22}, resume=True, quiet=True).steps == 22


@pytest.mark.parametrize("stop", [4, 7, 8, 9])
def test_a_run_that_skips_is_resumed_bit_for_bit(data: Path, tmp_path: Path, stop: int) -> None:
    recipe, run = tiny_recipe(data, *QUIET, "train.skip=[[3, 4], [9, 11]]"), tmp_path / "run"
    whole = learnt(train_run(recipe, out=tmp_path / "whole", quiet=True))
    with interrupted_in(stop), pytest.raises(TrainingInterrupted):
        train_run(recipe, out=run, quiet=True)
    with one_error("RUN_MISMATCH", r"train\.skip was \[\[3, 4\]"):
        train_run(
            recipe.replace({"train.skip": [[3, 5], [9, 11]]}), out=run, resume=True, quiet=True
        )
    train_run(recipe, out=run, resume=True, quiet=True)
    assert learnt(run) == whole


def test_what_cannot_skip_says_so(data: Path, tmp_path: Path) -> None:
    for wrong in "[[5, 4]]", "[[3, 4], [5, 6]]", "[[7, 8], [3, 4]]", "[[-1, 4]]", "[3, 4]":
        with one_error("RECIPE", "skip"):
            tiny_recipe(data, f"train.skip={wrong}")
    skipping = tiny_recipe(data, *QUIET, "train.skip=[[3, 4]]")
    with one_error("SELECTION", "prioritized draws depends on losses"):
        learning = skipping.replace({"selection.strategy": "prioritized"})
        train_run(learning, out=tmp_path / "run", quiet=True)
    sizes = ModelSizes(state_dim=3, action_dim=1, discrete=False)
    assert "train.skip" in (why_not_stacked(skipping, sizes, learns=False) or "")


STEPS, RARE = 80, (45, 65)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[int]]:
    """A run on learnable data but for an episode, and the batches that have that."""
    folder, lengths = tmp_path_factory.mktemp("spoilt"), [6, 4, 7, 5] * 50
    columns = hopper_columns(sum(lengths), state_dim=4, action_dim=2)
    columns["terminals"][np.cumsum(lengths) - 1] = True
    columns["actions"] = np.tanh(columns["observations"][:, :2]).astype(np.float32)
    go.convert(go.from_arrays(columns), folder / "sound", quiet=True)
    loader = go.GearLoader(folder / "sound", 4, context_length=3, device="cpu")
    drawn = [set(loader.segments_at(step).episodes.tolist()) for step in range(STEPS)]
    batches = {e: [s for s in range(STEPS) if e in drawn[s]] for e in set().union(*drawn)}
    rare = {e: b for e, b in batches.items() if RARE[0] <= b[0] and b[-1] < RARE[1]}
    culprit = max(rare, key=lambda e: len(rare[e]))
    begin = sum(lengths[:culprit])
    columns["actions"][begin : begin + lengths[culprit]] = 9.0
    half = sum(lengths) // 2
    halves = [
        go.from_arrays({key: values[part] for key, values in columns.items()}, name=name)
        for name, part in (("a", slice(half)), ("b", slice(half, None)))
    ]
    go.convert(go.join_sources(halves), folder / "data", quiet=True)
    settings = {
        "train.steps": STEPS,
        "train.log_every": 2,
        "optimizer.learning_rate": 3e-3,
        "model.action_tanh": False,
        "train.evaluate_every": None,
    }
    recipe = tiny_recipe(folder / "data", *QUIET, "train.keep_checkpoints=99").replace(settings)
    return train_run(recipe, out=folder / "run", quiet=True), culprit, rare[culprit]


def test_the_culprit_is_named_and_left_out(
    spoilt: tuple[Path, int, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, culprit, batches = spoilt
    spikes = go.find_spikes(run)
    assert {n for one in spikes for n in range(one.first, one.last + 1)} >= set(batches)
    assert all(one.loss > 5 * one.usual for one in spikes)
    first, last = batches[0], batches[-1]
    page = go.blame(run, first, last, device="cpu")
    worst = page.episodes[0]
    assert page.verdict.startswith("Due to the data") and f"episode {culprit} alone" in page.verdict
    assert page.checkpoint <= first < page.checkpoint + 5 and page.without == [[first, last]]
    source = f"episode {culprit % 100} of {'ab'[culprit // 100]}"
    assert (worst.episode, worst.seen, worst.source) == (culprit, 0, source)
    assert worst.length == go.open_dataset(run.parent / "data").episodes.lengths[culprit]
    assert sum(one.drawn for one in page.episodes) == 4 * (last + 1 - first)
    rise = page.loss - page.ordinary_loss
    assert sum(one.adds for one in page.episodes) == pytest.approx(rise, rel=1e-9)

    assert main(["blame", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{spikes[0].first}..{spikes[0].last}: loss ")
    words = ["blame", str(run), f"{first}..{last}", "--device", "cpu"]
    assert main([*words, "-q"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["episodes"][0]["episode"] == culprit

    again = go.train(str(run), {"train.skip": page.without}, checkpoint=page.checkpoint, quiet=True)
    assert go.find_spikes(again) == [] and again.steps == STEPS
    with one_error("USAGE", f"no batches from {first} to {last}"):
        go.blame(again, first, last)
    assert go.blame(again, last + 1, last + 9, device="cpu").verdict.startswith("No spike")


def test_a_spike_without_a_culprit(spoilt: tuple[Path, int, list[int]], tmp_path: Path) -> None:
    """Of losses that rise under the weights of then only, the data are not the cause."""
    run = tmp_path / "run"
    shutil.copytree(spoilt[0], run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[15]["loss"] = 40.0  # of batches 30 and 31
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spikes = go.find_spikes(run)
    assert (spikes[0].first, spikes[0].last, spikes[0].loss) == (30, 31, 40.0)
    page = go.blame(run, 30, 31, device="cpu")
    assert page.verdict.startswith("Not the data: they explain 0%")
    for step, path in list_checkpoints(run / "checkpoints"):
        if step < 40:
            shutil.rmtree(path)
    later = go.blame(run, 30, 31, device="cpu")
    assert later.checkpoint == 40 and later.without is None
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("uniform_steps", "prioritized"))
    with one_error("SELECTION", "prioritized drew depends on losses"):
        go.blame(run, 30, 31)
    (run / "recipe.yaml").write_text(recipe.replace("admit_every: null", "admit_every: 10"))
    with one_error("SELECTION", "the data grew"):
        go.blame(run, 30, 31)
    (run / "recipe.yaml").write_text(recipe.replace("/data\n", "/sound\n"))
    with one_error("LOADER_STATE", "dataset is"):
        go.blame(run, 30, 31)
