"""Evaluations beside training: the same returns, later; lost workers leave nothing behind.

Real workers take seconds to start, so most tests use one that plays in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.evaluation import beside as evaluation_beside
from gear_offline.evaluation import choice as evaluation_choice
from gear_offline.evaluation.beside import EvaluationsBeside
from gear_offline.evaluation.choice import EvaluationChoice, choose_evaluation
from gear_offline.evaluation.worker import PlayRequest
from gear_offline.runs.trainer import TrainingInterrupted, train
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import read_records
from tests.support import failing_code
from tests.test_resume import interrupted_in
from tests.training_support import (
    ENVIRONMENT,
    STEP_LIMIT,
    FakeWorker,
    learnt,
    register_importable,
    tiny_recipe,
)
from tests.trust.leaks import session_processes, wait_until_gone

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """Register the environment so that other processes can make it; no plots."""
    register_importable()
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)


@pytest.fixture(scope="module")
def in_place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_importable()
    out = tmp_path_factory.mktemp("runs") / "in-place"
    return train(tiny_recipe(data, "evaluate.background=off"), out=out, quiet=True)


def played(run: Path) -> list[Any]:
    """Return everything of the evaluations but times and where they were played."""
    return [
        (record["step"], record["score"], [dict(target) for target in record["targets"]])
        for record in read_records(run / "evaluations.jsonl")
    ]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.delay = FakeWorker.deadly = 0
    FakeWorker.made = []
    monkeypatch.setattr(evaluation_beside, "Worker", FakeWorker)
    monkeypatch.setattr(evaluation_beside, "POLL_SECONDS", 0.0)
    return FakeWorker


def test_real_workers_find_the_same_returns(data: Path, in_place: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, "evaluate.background=on", "evaluate.workers=2")
    run = train(recipe, out=tmp_path / "run", quiet=True)
    assert played(run) == played(in_place)
    assert learnt(run)["model"] == learnt(in_place)["model"], "training draws the same numbers"
    records = read_records(run / "evaluations.jsonl")
    assert all(record["staleness_seconds"] > 0 for record in records)
    assert records[0]["staleness_steps"] > 0 and records[0]["device"] == "cpu"
    best = max(records, key=lambda record: record["score"])
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation"]["beside"] and summary["evaluation"]["staleness_steps_max"] > 0
    assert summary["evaluation_best"]["step"] == best["step"]


@pytest.mark.long
def test_a_killed_trainer_leaves_no_worker_and_loses_no_evaluation(
    data: Path, in_place: Path, tmp_path: Path
) -> None:
    """kill -9 while two real workers are starting; the resumed run plays what was outstanding."""
    run, program = tmp_path / "run", "from tests.test_evaluation_beside import child; child()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(data), str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(session_processes(trainer.pid)) < 3 or len(list_checkpoints(run / "checkpoints")) < 2:
        assert trainer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert wait_until_gone(trainer.pid), "workers end with the trainer"
    assert read_records(run / "evaluations.jsonl") == []
    assert 7 in [step for step, _ in list_checkpoints(run / "checkpoints")], "it is still pinned"
    train(tiny_recipe(data, "evaluate.background=off"), out=run, resume=True, quiet=True)
    assert played(run) == played(in_place)
    assert learnt(run)["training"] == learnt(in_place)["training"]


def child() -> None:
    """Train with two workers and stay at the end, for a test that kills."""
    register_importable()
    # Written at once: an evaluation begins when its checkpoint is there, and steps end at 15.
    options = ("evaluate.background=on", "evaluate.workers=2")
    recipe = tiny_recipe(Path(sys.argv[1]), *options)
    with interrupted_never():
        train(recipe, out=Path(sys.argv[2]), quiet=True)


@contextmanager
def interrupted_never() -> Iterator[None]:
    """Let the steps after the second evaluation take for ever."""
    advance = Learner.advance

    def slow(self: Learner) -> None:
        if self.step >= 15:
            time.sleep(600)
        advance(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "advance", slow)
        yield


@pytest.mark.parametrize(("delay", "workers"), [(0, 1), (3, 1), (40, 3)])
def test_every_evaluation_is_played_and_recorded_in_order(
    data: Path, in_place: Path, tmp_path: Path, fake: type[FakeWorker], delay: int, workers: int
) -> None:
    fake.delay = delay
    recipe = tiny_recipe(
        *(data, "evaluate.background=on", f"evaluate.workers={workers}", "train.evaluate_every=2"),
        *("train.keep_checkpoints=1", "train.checkpoint_every=20"),
    )
    run = train(recipe, out=tmp_path / "run", quiet=True)
    assert [step for step, _, _ in played(run)] == list(range(2, 21, 2))
    assert [p for p in played(run) if p[0] in (14, 20)] == [
        p for p in played(in_place) if p[0] in (14, 20)
    ]
    best = max(read_records(run / "evaluations.jsonl"), key=lambda r: (r["score"], r["step"]))
    kept = [step for step, _ in list_checkpoints(run / "checkpoints")]
    assert kept == sorted({best["step"], 20}), "pins are lifted once the result is there"
    assert len(fake.made) <= workers and all(worker.closed for worker in fake.made)
    stale = [r["staleness_steps"] for r in read_records(run / "evaluations.jsonl")]
    assert max(stale) > 0 if delay else max(stale) <= 4


def test_too_many_outstanding_wait_for_room(
    data: Path, tmp_path: Path, fake: type[FakeWorker]
) -> None:
    fake.delay, most = 25, 0
    submit = EvaluationsBeside.submit

    def counted(self: EvaluationsBeside, request: PlayRequest) -> None:
        nonlocal most
        submit(self, request)
        most = max(most, len(self.steps))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EvaluationsBeside, "submit", counted)
        recipe = tiny_recipe(data, "evaluate.background=on", "train.evaluate_every=1")
        run = train(recipe, out=tmp_path / "run", quiet=True)
    assert most == 1 + evaluation_beside.SPARE
    assert [step for step, _, _ in played(run)] == list(range(1, 21))
    assert json.loads((run / "summary.json").read_text())["evaluation"]["held_seconds"] > 0


def test_a_lost_worker_is_told_once_and_evaluations_go_on_in_place(
    data: Path,
    in_place: Path,
    tmp_path: Path,
    fake: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake.deadly = 14
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    run = train(tiny_recipe(data), out=tmp_path / "run")
    said = capfd.readouterr().err
    assert said.count("is gone (killed by SIGKILL): from here on evaluations interrupt") == 1
    assert "evaluations: beside training, 1 process on cpu" in said
    assert played(run) == played(in_place)
    assert learnt(run)["model"] == learnt(in_place)["model"]


def test_a_lost_worker_is_an_error_where_the_recipe_insists(
    data: Path, in_place: Path, tmp_path: Path, fake: type[FakeWorker]
) -> None:
    fake.deadly, run = 14, tmp_path / "run"
    recipe = tiny_recipe(data, "evaluate.background=on")
    code = failing_code(lambda: train(recipe, out=run, quiet=True))
    assert code == "EVALUATION_WORKER" and [step for step, _, _ in played(run)] == [7]
    fake.deadly = 0
    train(recipe, out=run, resume=True, quiet=True)
    assert played(run) == played(in_place)


@pytest.mark.parametrize("stop", [8, 14, 19])
def test_an_interrupted_run_makes_up_for_what_was_outstanding(
    data: Path, in_place: Path, tmp_path: Path, fake: type[FakeWorker], stop: int
) -> None:
    fake.delay, run = 1000, tmp_path / "run"
    recipe = tiny_recipe(data, "evaluate.background=on", "train.keep_checkpoints=1")
    with interrupted_in(stop), pytest.raises(TrainingInterrupted):
        train(recipe, out=run, quiet=True)
    assert played(run) == []
    fake.delay = 2
    train(recipe, out=run, resume=True, quiet=True)
    assert played(run) == played(in_place)
    assert learnt(run)["training"] == learnt(in_place)["training"]


def test_ctrl_c_at_the_end_leaves_evaluations_to_the_resumed_run(
    data: Path, in_place: Path, tmp_path: Path, fake: type[FakeWorker]
) -> None:
    wait, run = EvaluationsBeside.wait, tmp_path / "run"
    fake.delay = 10**9
    recipe = tiny_recipe(data, "evaluate.background=on")

    def interrupted(self: EvaluationsBeside) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EvaluationsBeside, "wait", interrupted)
        train(recipe, out=run, quiet=True)
    assert played(run) == []
    fake.delay = 0
    train(recipe, out=run, resume=True, quiet=True)
    assert played(run) == played(in_place)


def test_an_evaluation_that_fails_ends_the_run_with_its_code(
    data: Path, tmp_path: Path, fake: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise GearError("POLICY_NONFINITE", "an action that is NaN")

    monkeypatch.setattr("gear_offline.evaluation.evaluate.evaluate_policy", refuse)
    recipe = tiny_recipe(data, "evaluate.background=on")
    code = failing_code(lambda: train(recipe, out=tmp_path / "run", quiet=True))
    assert code == "POLICY_NONFINITE"


def test_when_evaluations_run_beside_training(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    gpu = torch.device("cuda", 0)
    recipe = tiny_recipe(data, f"evaluate.environment={ENVIRONMENT}")

    def chosen(device: torch.device, *overrides: str, parameters: int = 1000) -> tuple[Any, ...]:
        changed = tiny_recipe(data, f"evaluate.environment={ENVIRONMENT}", *overrides)
        found = choose_evaluation(changed, device, World(), parameters=parameters)
        return found.beside, str(found.device), found.workers, found.reason

    assert chosen(CPU) == (True, "cpu", 7, "7 processes on cpu")
    assert chosen(gpu) == (True, "cpu", 2, "2 processes on cpu")
    assert chosen(gpu, "evaluate.workers=5")[:3] == (True, "cpu", 5)
    assert chosen(gpu, "evaluate.device=cuda")[:3] == (True, "cuda:0", 1)
    assert chosen(gpu, "evaluate.background=off")[:2] == (False, "cuda:0")
    assert chosen(gpu, "evaluate.background=off", "evaluate.device=cpu")[:2] == (False, "cpu")
    assert "slow on CPU cores" in chosen(gpu, parameters=87_000_000)[3]
    assert chosen(gpu, "evaluate.device=cuda", parameters=87_000_000)[0]
    assert chosen(CPU, "train.evaluate_every=20")[3] == "nothing is evaluated before the end"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert chosen(CPU)[0] is False and chosen(CPU)[3] == "training uses all cores"
    assert chosen(CPU, "evaluate.background=on")[:3] == (True, "cpu", 1)
    gymnasium.registry.pop(ENVIRONMENT)
    gymnasium.register(ENVIRONMENT, lambda **_: None)  # type: ignore[arg-type]
    assert chosen(CPU)[3] == f"{ENVIRONMENT} is known to this process only"
    on = recipe.replace(evaluate__background="on")
    code = failing_code(lambda: choose_evaluation(on, CPU, World(), parameters=1))
    assert code == "EVALUATE_BESIDE"
    assert evaluation_choice.MOST_WORKERS == 8


def test_a_policy_can_act_elsewhere_in_place(
    data: Path, in_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with evaluate.device=cpu: the copy that acts is the model."""
    monkeypatch.setattr(
        "gear_offline.runs.evaluations.same_device", lambda one, other: False, raising=True
    )
    run = train(tiny_recipe(data, "evaluate.background=off"), out=tmp_path / "run", quiet=True)
    assert played(run) == played(in_place)
    assert learnt(run)["training"] == learnt(in_place)["training"]


@pytest.mark.parametrize("beside", ["on", "off"])
def test_a_damaged_checkpoint_of_an_outstanding_evaluation_is_told(
    data: Path,
    tmp_path: Path,
    fake: type[FakeWorker],
    capfd: pytest.CaptureFixture[str],
    beside: str,
) -> None:
    fake.delay, run = 10**9, tmp_path / "run"
    recipe = tiny_recipe(data, "evaluate.background=on")
    with interrupted_in(16), pytest.raises(TrainingInterrupted):
        train(recipe, out=run, quiet=True)
    (run / "checkpoints" / "step-00000007" / "config.json").write_text("{}")
    fake.delay = 0
    train(recipe.replace(evaluate__background=beside), out=run, resume=True)
    assert capfd.readouterr().err.count("step 7 cannot be evaluated") == 1
    assert [step for step, _, _ in played(run)] == [14, 20]


def test_a_machine_without_room_for_a_process_goes_on(
    data: Path, in_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(subprocess, "Popen", refuse)
    run = train(tiny_recipe(data), out=tmp_path / "run", quiet=True)
    assert played(run) == played(in_place)


def test_cores_that_could_not_keep_up_leave_evaluations_in_place(
    data: Path,
    in_place: Path,
    tmp_path: Path,
    fake: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As ``auto`` decides for a GPU, at the first evaluation, by what steps have taken."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    recipe = tiny_recipe(
        *(data, f"evaluate.environment={ENVIRONMENT}", "evaluate.targets=[1.0, 2.0]"),
        "evaluate.episodes=100",
    )
    gpu = torch.device("cuda", 0)
    tried = choose_evaluation(recipe, gpu, World(), parameters=1_000_000)
    # steps x tokens x 2 a parameter, on four threads
    seconds = STEP_LIMIT * 200 * 9 * 2e6 / evaluation_choice.CORE_FLOPS / 4
    assert tried.most_seconds == pytest.approx(seconds) and tried.workers == 2
    assert tried.is_too_slow(seconds / 4.1) and not tried.is_too_slow(seconds / 3.9)
    assert tried.otherwise is not None and str(tried.otherwise.device) == "cuda:0"
    insisting = recipe.replace(evaluate__background="on")
    assert choose_evaluation(insisting, gpu, World(), parameters=1_000_000).otherwise is None

    here = choose_evaluation(
        tiny_recipe(data, "evaluate.background=off"), CPU, World(), parameters=1
    )

    def undecided(seconds: float) -> Any:
        return lambda *_, **__: EvaluationChoice(
            beside=True, reason="", device=CPU, most_seconds=seconds, otherwise=here
        )

    collected: list[int] = []  # where a sharded model's weights would be, for this process to act
    monkeypatch.setattr(Learner, "prepare_policy", lambda self: collected.append(self.step))
    for seconds, workers in ((1e9, 0), (1e-9, 1)):
        FakeWorker.made.clear()
        monkeypatch.setattr("gear_offline.runs.leading_run.choose_evaluation", undecided(seconds))
        run = train(tiny_recipe(data), out=tmp_path / str(workers))
        assert played(run) == played(in_place) and len(fake.made) == workers
        said = capfd.readouterr().err.count("evaluate.background=on insists")
        assert said == (0 if workers else 1)
    assert collected == [7, 14, 20], "of the run that plays in place alone"
