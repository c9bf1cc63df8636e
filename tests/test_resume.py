"""Resuming: bit for bit after any kill, deterministic or not; refused as another run."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gear_offline as go
from gear_offline.artifacts.checkpoint import list_checkpoints, read_checkpoint
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.training.seeding import deterministic
from gear_offline.training.step import EagerStep, GraphStep
from tests.model_support import float64, meta
from tests.ranks_support import ranks_recipe
from tests.support import make_dataset, one_error, write_hdf5
from tests.test_parallel_training import trained
from tests.training_support import (
    ACTION_DIM,
    ENVIRONMENT,
    EPISODE_LENGTHS,
    STATE_DIM,
    learnt,
    tiny_recipe,
)

pytestmark = pytest.mark.usefixtures("whole", "no_reports")


@pytest.mark.parametrize("stop", [1, 5, 7, 14])
def test_an_interrupted_run_goes_on(whole: Path, data: Path, tmp_path: Path, stop: int) -> None:
    run = tmp_path / "run"
    said = f"after step {stop},"
    with interrupted_in(stop), pytest.raises(TrainingInterrupted, match=said) as caught:
        train_run(tiny_recipe(data), out=run, quiet=True)
    assert f"gear-offline train {run} --resume" in str(caught.value)
    assert list_checkpoints(run / "checkpoints")[-1][0] == stop
    train_run(load_recipe(run), out=run, resume=True, quiet=True)
    assert learnt(run) == learnt(whole)


def stopped(step: int, data: Path, folder: Path, *overrides: str) -> Path:
    """Return a run that a signal ended in the middle of a step."""
    with interrupted_in(step), pytest.raises(TrainingInterrupted):
        train_run(tiny_recipe(data, *overrides), out=folder / "run", quiet=True)
    return folder / "run"


@contextmanager
def interrupted_in(step: int) -> Iterator[None]:
    """Send this process a signal in the middle of the optimiser step `step`."""
    with pytest.MonkeyPatch.context() as patched:
        for kind in (EagerStep, GraphStep):

            def interrupted(self: Any, run: Any = kind.run) -> Any:
                if self.learner.step + 1 == step:
                    os.kill(os.getpid(), signal.SIGINT)
                return run(self)

            patched.setattr(kind, "run", interrupted)
        yield


@pytest.mark.parametrize(
    "place", ["artifacts.trained.assemble", "runs.evaluations.evaluate_together"]
)
def test_ctrl_c_ends_an_evaluation_which_the_resumed_run_repeats(
    whole: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
) -> None:
    """Also while its checkpoint is read: that is no damage."""
    run = tmp_path / "run"

    def slow(*_: Any, **__: Any) -> None:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(f"gear_offline.{place}", slow)
        with pytest.raises(TrainingInterrupted, match="after step 7,"):
            train_run(tiny_recipe(data, "evaluate.background=off"), out=run)
    assert "not evaluated, stopped; resume=True does it" in capfd.readouterr().err
    assert read_records(run / "evaluations.jsonl") == []
    train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert learnt(run) == learnt(whole)


def test_a_damaged_checkpoint_is_passed_over(
    whole: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = stopped(12, data, tmp_path)
    newest = run / "checkpoints" / "step-00000012" / "model.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    train_run(tiny_recipe(data), out=run, resume=True)
    assert "passing over step-00000012" in capfd.readouterr().err
    assert learnt(run) == learnt(whole)

    last = list_checkpoints(run / "checkpoints")[-1][1] / "state.json"
    last.write_text("{}")
    train_run(tiny_recipe(data, "train.keep_checkpoints=1"), out=run, resume=True, quiet=True)
    assert learnt(run)["model"] == learnt(whole)["model"], "saved again, not kept as it was"
    read_checkpoint(last.parent)

    for _, path in list_checkpoints(run / "checkpoints"):
        (path / "state.json").write_text("{}")
    with one_error("RUN_DAMAGED", "none of the checkpoints is whole"):
        train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    shutil.rmtree(run / "checkpoints")
    train_run(tiny_recipe(data), out=run, resume=True)
    assert "no checkpoint is there: the run begins again" in capfd.readouterr().err
    assert learnt(run) == learnt(whole)


def test_resuming_with_another_recipe_names_the_change(whole: Path, data: Path) -> None:
    changes = "seed=1 loader.batch_size=5 model.dropout=0.2 optimizer.learning_rate=1e-3 "
    changes += "train.log_every=4 evaluate.seed=5 evaluate.targets=[1.0]"
    for change in changes.split():
        with one_error("RUN_MISMATCH", change.split("=")[0]):
            train_run(tiny_recipe(data, change), out=whole, resume=True, quiet=True)
    with one_error("RUN_MISMATCH") as caught:  # all at once
        train_run(tiny_recipe(data, *changes.split()), out=whole, resume=True, quiet=True)
    assert {text.split()[0] for text in caught.value.problem.split("; ")} == {
        change.split("=")[0] for change in changes.split()
    }
    with one_error("RUN_MISMATCH", "^.RUN_MISMATCH. model.kind was [^;]* and is 'mlp' now .*$"):
        train_run(tiny_recipe(data, "model.kind=mlp"), out=whole, resume=True, quiet=True)


def test_an_edited_recipe_of_a_run_is_told(whole: Path, data: Path, tmp_path: Path) -> None:
    """`recipe.yaml` is text in the user's hands; checkpoints say how the run began."""
    run = stopped(4, data, tmp_path)
    file = run / "recipe.yaml"
    begun = file.read_text()
    file.write_text(begun.replace("dropout: 0.1", "dropout: 0.2"))
    assert file.read_text() != begun
    with one_error("RUN_MISMATCH", r"model\.dropout was 0\.1 .* is 0\.2 now") as caught:
        train_run(load_recipe(file), out=run, resume=True, quiet=True)
    assert f"in {file}" in caught.value.remedy
    train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert file.read_text() == begun
    assert learnt(run) == learnt(whole)


def test_a_run_can_be_made_longer(whole: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(tiny_recipe(data, "train.steps=9"), out=run, quiet=True)
    with pytest.raises(InputError, match="9 steps are done"):
        train_run(tiny_recipe(data, "train.steps=8"), out=run, resume=True, quiet=True)
    train_run(tiny_recipe(data, "train.graph=off"), out=run, resume=True, quiet=True)
    assert learnt(run)["model"] == learnt(whole)["model"]
    falling = ("optimizer.schedule=cosine",)
    train_run(tiny_recipe(data, "train.steps=9", *falling), out=tmp_path / "b", quiet=True)
    with pytest.raises(InputError, match=r"train\.steps was 9"):
        train_run(tiny_recipe(data, *falling), out=tmp_path / "b", resume=True, quiet=True)


def test_a_longer_run_keeps_what_was_settled(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a recipe that leaves it open again: rates of steps done are those of the first run.

    A warm-up over a tenth of 40 steps rises by quarters; the peak follows.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # so a small model has one thread
    run, open_ = tmp_path / "run", ["optimizer.warmup_steps=auto", "train.log_every=1"]
    open_ += ["train.threads=null", "evaluate.episodes=0"]
    train_run(tiny_recipe(data, "train.steps=40", *open_), out=run, quiet=True)
    settled = load_recipe(run)
    assert (settled.optimizer.warmup_steps, settled.train.precision) == (4, "fp32")
    assert settled.train.threads == 1 and settled.train.compile == "off"
    train_run(tiny_recipe(data, "train.steps=60", *open_), out=run, resume=True, quiet=True)
    rates = [one["learning_rate"] for one in read_records(run / "metrics.jsonl")]
    assert rates == pytest.approx([1e-2 * min(1.0, (step + 1) / 4) for step in range(60)])
    assert load_recipe(run) == settled.replace("train.steps=60")
    again = ("train.steps=70", "train.precision=fp32", "optimizer.warmup_steps=4")
    train_run(tiny_recipe(data, *open_, *again), out=run, resume=True, quiet=True)
    with pytest.raises(InputError, match="warmup_steps was 4 when"):
        train_run(
            tiny_recipe(data, *open_, "train.steps=80", "optimizer.warmup_steps=5"),
            out=run,
            resume=True,
            quiet=True,
        )


def test_a_run_is_resumed_from_another_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data, tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    options = "evaluate.episodes=0", "train.steps=2"
    go.train(tiny_recipe(Path("d"), *options), out="run", quiet=True)
    made_of = f"data.source={write_hdf5(Path('x.hdf5'))}"
    go.train(tiny_recipe(Path("made"), *options, made_of), out="made-run", quiet=True)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert go.train("../run", "train.steps=3", resume=True, quiet=True).steps == 3
    moved = f"data.path={shutil.move(tmp_path / 'd', other / 'e')}"
    for source in ((), ("data.source=d4rl:hopper-medium-v2",)):  # it would be made again
        with one_error("DATASET_NOT_FOUND", f"no dataset at {tmp_path / 'd'}") as caught:
            go.train("../run", ("train.steps=4", *source), resume=True, quiet=True)
        assert "say where it is now, data.path=" in caught.value.remedy
    assert go.train("../run", ("train.steps=4", moved), resume=True, quiet=True).steps == 4
    assert os.listdir(other) == ["e"]
    shutil.rmtree(tmp_path / "made")  # it is made again, of the same file
    assert go.train(go.load_recipe("../made-run"), out="../again", quiet=True).steps == 2


def test_trainings_in_threads_learn_what_they_learn_alone(data: Path, tmp_path: Path) -> None:
    seeds, options = range(3), ("evaluate.episodes=0", "model.dropout=0.5", "train.steps=12")

    def learn(place: str, seed: int) -> Any:
        out = tmp_path / f"{place}{seed}"
        train_run(tiny_recipe(data, *options, f"seed={seed}"), out=out, quiet=True)
        return learnt(out)["model"]

    alone = [learn("alone", seed) for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(learn, "thread", seed) for seed in seeds]
        read = pool.submit(lambda: [load_policy(tmp_path / "alone0") for _ in range(20)])
        assert [one.result() for one in together] == alone
        read.result()


def test_a_run_that_ends_where_it_was_stopped_has_no_rates_of_its_own(
    data: Path, tmp_path: Path
) -> None:
    """The last line had a learning rate of 0 and a rate of samples that nobody reached."""
    run = stopped(8, data, tmp_path)
    train_run(tiny_recipe(data, "train.steps=8"), out=run, resume=True, quiet=True)
    before, last = read_records(run / "metrics.jsonl")[-2:]
    assert (before["step"], last["step"]) == (6, 8) and last["loss"] > 0
    assert before["learning_rate"] == last["learning_rate"] == 1e-2
    assert last.keys() == {"step", "loss", "gradient_norm", "learning_rate"}


def test_another_dataset_is_not_resumed_with(data: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"state_dim": STATE_DIM, "action_dim": ACTION_DIM, "seed": 9}
    sizes["environment_id"] = ENVIRONMENT
    other = make_dataset(tmp_path / "other", EPISODE_LENGTHS, **sizes).path
    link = tmp_path / "link"
    link.symlink_to(data)
    run = stopped(4, link, tmp_path, "evaluate.targets=[1.0]")
    link.unlink()
    link.symlink_to(other)
    with one_error("LOADER_STATE", "the run began with other data"):
        train_run(tiny_recipe(link, "evaluate.targets=[1.0]"), out=run, resume=True, quiet=True)
    options = {"evaluate.targets": [1.0], "evaluate.background": "off", "train.steps": 2}
    sweep = partial(go.sweep, seeds=1, out=tmp_path / "sweep", quiet=True)
    assert sweep(tiny_recipe(data).replace(options)).is_complete
    with one_error("LOADER_STATE", "the run began with other data"):
        sweep(tiny_recipe(other).replace(options))


def torch_settings() -> list[object]:
    cudnn = torch.backends.cudnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        *(cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    ]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, float64, meta])
def test_a_caller_s_torch_changes_no_weights(
    around: Any, whole: Path, data: Path, tmp_path: Path
) -> None:
    with around():
        run = train_run(tiny_recipe(data), out=tmp_path / "run", quiet=True)
        assert torch.get_default_dtype() == (torch.float64 if around is float64 else torch.float32)
    assert learnt(run) == learnt(whole)
    recipe = tiny_recipe(data)
    with one_error("USAGE", "torch.autocast is on"), torch.autocast("cpu"):
        train_run(recipe, out=tmp_path / "other", quiet=True)


def test_torch_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.set_float32_matmul_precision("high")
    try:
        before = torch_settings()
        with deterministic(False):
            assert torch_settings() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with deterministic(True):
            assert torch_settings() == [True, False, True, False, "highest", False, False]
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch_settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.long
def test_three_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    """A rank killed at step 14 and restarted from 10 learns what undisturbed ranks learn.

    With three ranks the place of a gradient in its group decides the order of the sum.
    """
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    found = []
    for kill_at in (0, 14):
        run = tmp_path / f"run{kill_at}"
        options = "train.deterministic=true", "model.dropout=0.1"
        recipe = ranks_recipe(tmp_path / f"{kill_at}.yaml", data, *options)
        said = trained(3, recipe, run, 20, kill_at=kill_at)
        assert ("resuming after step 10" in said) == (kill_at > 0)
        _, last = list_checkpoints(run / "checkpoints")[-1]
        names = ("model.safetensors", "training.safetensors")
        found.append([last.name, *((last / name).read_bytes() for name in names)])
    assert found[0] == found[1]
