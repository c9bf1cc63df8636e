"""Evaluations in the background: the same returns, later; failures are recorded, no more.

Real workers take seconds to start, so most tests use one that plays in this process.
"""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import gear_offline as go
from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.artifacts.json_lines import read_records
from gear_offline.core.workers import WorkerPool
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.evaluation.tasks import tasks_of
from gear_offline.models.policy import Policy
from gear_offline.runs import evaluations
from gear_offline.runs.evaluations import EvaluationPlan, RunEvaluations, plan_evaluations
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.runs.run import open_run
from tests.gpu_support import ON_GPU
from tests.support import Captured, Patch
from tests.test_resume import interrupted_in
from tests.training_support import (
    ENVIRONMENT,
    FakePool,
    learnt,
    register_importable,
    tiny_data,
    tiny_recipe,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def importable(no_reports: None, data: Path) -> None:
    """Register the environment so that other processes can make it; no plots."""
    register_importable()


@pytest.fixture(scope="module")
def in_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_importable()
    out = tmp_path_factory.mktemp("runs") / "in-process"
    return train_run(tiny_recipe(data, "evaluate.background=off"), out=out, quiet=True)


@pytest.fixture
def fake(monkeypatch: Patch) -> type[FakePool]:
    FakePool.delay = FakePool.deadly = 0
    FakePool.made = []
    monkeypatch.setattr(evaluations, "WorkerPool", FakePool)
    monkeypatch.setattr(evaluations, "POLL_SECONDS", 0.0)
    return FakePool


def played(run: Path) -> list[Any]:
    """Return everything of the evaluations but times and where they were played."""
    return [
        (record["step"], record["return"], [dict(target) for target in record["targets"]])
        for record in read_records(run / "evaluations.jsonl")
    ]


@pytest.mark.parametrize(
    ("device", "thread"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=ON_GPU)]
)
def test_real_workers_find_the_same_returns(
    data: Path, in_process: Path, tmp_path: Path, monkeypatch: Patch, device: str, thread: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if thread and device == "cpu":  # a fresh interpreter is the case beside it
        request.getfixturevalue("forked_workers")

    def planned(*words: Any, **options: Any) -> EvaluationPlan:
        plan = plan_evaluations(*words, **options)
        return replace(plan, thread=True, cores=2) if plan.workers and thread else plan

    monkeypatch.setattr(evaluations, "plan_evaluations", planned)
    recipe = tiny_recipe(data, f"train.device={device}", f"evaluate.device={device}")
    background = recipe.replace({"evaluate.background": "on", "evaluate.workers": 1})
    run = train_run(background, out=tmp_path / "run", quiet=True)
    if device == "cpu":
        assert learnt(run)["model"] == learnt(in_process)["model"], "training draws the same"
    else:
        between = recipe.replace({"evaluate.background": "off"})
        in_process = train_run(between, out=tmp_path / "between", quiet=True)
    assert played(run) == played(in_process)
    records = read_records(run / "evaluations.jsonl")
    assert all(record["staleness_seconds"] > 0 for record in records)
    assert records[0]["staleness_steps"] > 0 and records[0]["device"].startswith(device)
    best = open_run(run).best
    assert best is not None
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best.step:08d}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation"]["background"]
    assert summary["evaluation_best"]["step"] == best.step


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_checkpoint_that_a_full_disk_does_not_take_is_not_played(
    data: Path, in_process: Path, tmp_path: Path, fake: None, monkeypatch: Patch, mode: str
) -> None:
    """The first two checkpoints, of steps 5 and 7, are given up; the run is as without that."""
    rename, left = os.rename, 2

    def full(source: Any, target: Any) -> None:
        nonlocal left
        if left and "checkpoints" in str(target):
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    recipe = tiny_recipe(data, f"evaluate.background={mode}")
    run = train_run(recipe, out=tmp_path / "run", quiet=True)
    assert played(run) == played(in_process)[1:]
    assert learnt(run)["model"] == learnt(in_process)["model"]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_last_checkpoint_that_fails_is_not_waited_for(
    data: Path, tmp_path: Path, fake: None, monkeypatch: Patch, mode: str
) -> None:
    rename = os.rename

    def bad(source: Any, target: Any) -> None:
        if str(target).endswith("step-00000020"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", bad)
    recipe = tiny_recipe(data, f"evaluate.background={mode}")
    with pytest.raises(GearError, match="Input/output error"):
        train_run(recipe, out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("delay", "workers"), [(0, 1), (3, 1), (40, 3)])
def test_every_evaluation_is_played_and_recorded_in_order(
    data: Path, in_process: Path, tmp_path: Path, fake: type[FakePool], delay: int, workers: int
) -> None:
    fake.delay = delay
    recipe = tiny_recipe(
        *(data, "evaluate.background=on", f"evaluate.workers={workers}", "train.evaluate_every=2"),
        *("train.keep_checkpoints=1", "train.checkpoint_every=20"),
    )
    run = train_run(recipe, out=tmp_path / "run", quiet=True)
    assert [step for step, _, _ in played(run)] == list(range(2, 21, 2))
    assert [p for p in played(run) if p[0] in (14, 20)] == [
        p for p in played(in_process) if p[0] in (14, 20)
    ]
    best = open_run(run).best
    kept = [step for step, _ in list_checkpoints(run / "checkpoints")]
    assert best is not None and set(kept) == {best.step, 20}, "pins are lifted at last"
    assert fake.made[0].most <= workers and all(pool.closed for pool in fake.made)


def refuse(error: Exception) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


NAN = GearError("MODEL", "an action that is NaN")
FULL = OSError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("mode", "place", "error", "recorded"),
    [
        ("on", (Policy, "ask"), NAN, "NaN"),
        ("off", (Policy, "ask"), NAN, "NaN"),
        ("off", (Policy, "ask"), ZeroDivisionError(), ""),
        ("on", (subprocess, "Popen"), FULL, "cannot be started"),
        ("on", None, None, "WORKER_LOST"),
    ],
)
def test_an_evaluation_that_fails_is_recorded_and_training_goes_on(
    data: Path, in_process: Path, tmp_path: Path, fake: type[FakePool], monkeypatch: Patch,
    capfd: Captured, mode: str, place: tuple[Any, str] | None, error: Exception | None,
    recorded: str,
) -> None:  # fmt: skip
    failed = [7, 14, 20]
    if place is None or error is None:
        fake.deadly, failed = 14, [14]
    else:
        monkeypatch.setattr(*place, refuse(error))
    if error is FULL:
        monkeypatch.setattr(evaluations, "WorkerPool", WorkerPool)
    run = train_run(tiny_recipe(data, f"evaluate.background={mode}"), out=tmp_path / "run")
    said = capfd.readouterr().err
    where = "in the training process" if mode == "off" else "in the background ("
    assert f"evaluation: {where}" in said and said.count("evaluation failed") >= len(failed)
    records = read_records(run / "evaluations.jsonl")
    assert [record["step"] for record in records] == [7, 14, 20]
    for record in records:
        assert ("error" in record) == (record["return"] is None) == (record["step"] in failed)
        assert recorded in record.get("error", recorded)
    good = [one for one in played(in_process) if one[0] not in failed]
    assert [one for one in played(run) if one[0] not in failed] == good
    assert learnt(run)["model"] == learnt(in_process)["model"]
    best = json.loads((run / "summary.json").read_text())["evaluation_best"]
    assert (best is None) == (len(failed) == 3)
    assert all(pool.closed for pool in fake.made)


def test_an_evaluation_that_failed_is_played_once_again_by_each_call(
    data: Path, in_process: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """What is last and best is that of a run whose evaluations never failed."""
    ask, calls = Policy.ask, list[int]()

    def refuse_first(self: Policy, *inputs: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise NAN
        return ask(self, *inputs, **options)

    recipe = tiny_recipe(data, "evaluate.background=off", "train.keep_checkpoints=9")
    monkeypatch.setattr(Policy, "ask", refuse_first)
    for lines in ([7, 14, 20], [7, 14, 20, 7], [7, 14, 20, 7, 7], [7, 14, 20, 7, 7]):
        if lines.count(7) < 3:
            calls.clear()
        (result,) = go.sweep(recipe, seeds=1, parallel=1, out=tmp_path / "sweep", quiet=True).trials
        records = read_records(result.path / "evaluations.jsonl")
        assert [record["step"] for record in records] == lines
    run, whole = open_run(result.path), open_run(in_process)
    summary = json.loads((run.path / "summary.json").read_text())
    assert result.last is not None and result.last.step == summary["evaluation_last"]["step"] == 20
    for ours, other in ((run.last, whole.last), (run.best, whole.best), (result.last, whole.last)):
        assert ours is not None and other is not None
        assert (ours.step, ours.mean_return) == (other.step, other.mean_return)
    assert [*map(int, run.evaluations["step"])] == [7, 14, 20]


@pytest.mark.parametrize("stop", [8, 19, "end"])
def test_an_interrupted_run_makes_up_for_what_was_outstanding(
    data: Path, in_process: Path, tmp_path: Path, fake: type[FakePool], stop: int | str
) -> None:
    """At its end it waits for them: Ctrl-C leaves them to the resumed run, and it is no error."""
    fake.delay, run, finish = 10**9, tmp_path / "run", RunEvaluations.finish
    recipe = tiny_recipe(data, "evaluate.background=on", "train.keep_checkpoints=1")

    def interrupted(self: RunEvaluations) -> Iterator[bool]:
        for waits in finish(self):
            os.kill(os.getpid(), signal.SIGINT)
            yield waits

    if isinstance(stop, int):
        with interrupted_in(stop), pytest.raises(TrainingInterrupted):
            train_run(recipe, out=run, quiet=True)
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RunEvaluations, "finish", interrupted)
            train_run(recipe, out=run, quiet=True)
    assert played(run) == []
    fake.delay = 2
    train_run(recipe, out=run, resume=True, quiet=True)
    assert played(run) == played(in_process)
    assert learnt(run)["training"] == learnt(in_process)["training"]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_damaged_checkpoint_of_an_outstanding_evaluation_is_told(
    data: Path, tmp_path: Path, fake: type[FakePool], mode: str
) -> None:
    fake.delay, run = 10**9, tmp_path / "run"
    recipe = tiny_recipe(data, "evaluate.background=on")
    with interrupted_in(16), pytest.raises(TrainingInterrupted):
        train_run(recipe, out=run, quiet=True)
    (run / "checkpoints" / "step-00000007" / "config.json").write_text("{}")
    fake.delay = 0
    train_run(recipe.replace({"evaluate.background": mode}), out=run, resume=True, quiet=True)
    records = read_records(run / "evaluations.jsonl")
    assert [row["step"] for row in records if "error" in row] == [7]
    assert [row["step"] for row in records if "error" not in row] == [14, 20]


def test_when_evaluations_run_in_the_background(data: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    gpu = torch.device("cuda", 0)

    def planned(
        device: torch.device, *overrides: str, parameters: int = 1000
    ) -> tuple[int, int, str, int | None]:
        options = (f"evaluate.environment={ENVIRONMENT}", "evaluate.targets=[1.0]", *overrides)
        recipe = tiny_recipe(data, *options)
        plan = plan_evaluations(recipe, tasks_of(recipe), device, World(), parameters=parameters)
        return plan.workers, plan.threads, str(plan.device), plan.cores

    assert planned(CPU) == (7, 1, "cpu", 1)
    assert planned(gpu) == planned(gpu, "evaluate.device=cuda") == (1, 1, "cuda:0", 14)
    assert planned(gpu, "evaluate.device=cpu") == (1, 4, "cpu", 1)
    assert planned(gpu, "evaluate.background=off") == (0, 1, "cuda:0", None)
    assert planned(gpu, "evaluate.background=off", "evaluate.device=cpu") == (0, 1, "cpu", None)
    assert planned(gpu, parameters=87_000_000)[0] == 1
    assert planned(gpu, parameters=1_200_000_000)[0] == 0, "no memory for a copy"
    cpu = "evaluate.device=cpu"
    assert planned(gpu, cpu, parameters=87_000_000)[0] == 0, "slow on CPU cores"
    assert planned(CPU, "train.evaluate_every=20")[0] == 0, "nothing before the end"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert planned(CPU)[0] == 0, "training uses all cores"
    assert planned(CPU, "evaluate.background=on") == (1, 1, "cpu", 1)
    gymnasium.registry.pop(ENVIRONMENT)
    gymnasium.register(ENVIRONMENT, lambda **_: None)  # type: ignore[arg-type]
    assert planned(CPU, "evaluate.background=on")[0] == 0, "known to this process only"


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_a_worker_is_started_where_that_saves_time(
    data: Path, in_process: Path, tmp_path: Path, fake: type[FakePool], monkeypatch: Patch,
    seconds: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))
    monkeypatch.setattr(evaluations, "WORKER_SECONDS", seconds)
    run = train_run(tiny_recipe(data, "train.threads=1"), out=tmp_path / "run", quiet=True)
    assert played(run) == played(in_process)
    late = [record["staleness_steps"] for record in read_records(run / "evaluations.jsonl")]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation"]["background"] == any(late) == (seconds == 0.0)


@pytest.mark.parametrize(("kind", "told"), [("decision_transformer", 1), ("mlp", 0)])
def test_episodes_beyond_the_timesteps_are_told_once(
    tmp_path: Path, capfd: Captured, kind: str, told: int
) -> None:
    """Those of the environment have 6 steps; a perceptron sees no timesteps."""
    data, out = tiny_data(tmp_path / "data", [4, 1, 3]), tmp_path / "run"
    options = f"model.kind={kind}", "model.max_timestep=4", "evaluate.background=off"
    train_run(tiny_recipe(data, *options), out=out)
    assert capfd.readouterr().err.count("4 of 4 episodes outlasted model.max_timestep") == told
    train_run(tiny_recipe(data, *options, "train.steps=25"), out=out, resume=True)
    assert "outlasted" not in capfd.readouterr().err
