"""Runs that share a process or a stack: each is what it is alone, and its errors are its own."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load

from gear_offline.artifacts.json_lines import read_lines, read_records
from gear_offline.artifacts.records import EvaluationReport
from gear_offline.artifacts.trained import find_trained
from gear_offline.batches.tables import placement
from gear_offline.config.recipe import Recipe
from gear_offline.core.progress import Progress
from gear_offline.errors import GearError
from gear_offline.evaluation.play import evaluate_together
from gear_offline.runs import evaluations
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.sweep import work as sweep_work
from gear_offline.sweep.jobs import train_on_gpus
from gear_offline.sweep.stacks import train_stacks
from gear_offline.sweep.trials import Trial
from gear_offline.sweep.work import Work, run_errors
from gear_offline.training.learner import Learner
from gear_offline.training.stack import Stack
from gear_offline.training.step import EagerStep, GraphStep
from tests.gpu_support import INDUCTOR, NEEDS_CUPY, ON_GPU, ON_TWO_GPUS
from tests.support import Patch, hopper_columns, make_dataset, one_error
from tests.training_support import learnt, tiny_data, tiny_recipe

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has")
HIDDEN = RuntimeError("operation failed due to a previous error during capture")
HIDDEN.__context__ = NO_MEMORY  # torch raises this one: ending the capture fails as well
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nsee")
MODEL = ("evaluate.episodes=0", "model.hidden_size=16", "model.heads=2", "model.layers=2")
CUDA = (
    *("train.device=cuda", "train.graph=on", "train.precision=fp32", "train.compile=off"),
    *("model.hidden_size=32", "loader.batch_size=16", "loader.context_length=8"),
    *("train.steps=60", "train.log_every=7"),
)
pytestmark = pytest.mark.usefixtures("no_reports")
GOALS, LENGTHS = "loader.goals.future=1", [30, 7, 44, 12]
EXACT = ("train.precision=bf16", "train.deterministic=true")


def gpu(*changes: str, values: tuple[Any, ...] = ()) -> Any:
    """Return the parameters of a test on a GPU: what recipes change there, and `values`."""
    return pytest.param((*CUDA, *changes), *values, marks=[*ON_GPU, NEEDS_CUPY, INDUCTOR])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"), LENGTHS)


def trial_of(name: str, recipe: Recipe) -> Trial:
    return Trial(name=name, label=name, settings={}, recipe=recipe)


def trials_of(
    data: Path, *overrides: str, rates: Sequence[float] = (1e-3, 3e-4), seeds: int = 2
) -> list[Trial]:
    base = tiny_recipe(data, *MODEL, *overrides)
    changes = [
        {"optimizer.learning_rate": rate, "seed": seed} for rate in rates for seed in range(seeds)
    ]
    return [trial_of(f"t{n}", base.replace(change)) for n, change in enumerate(changes)]


def train_together(
    trials: Sequence[Trial], folder: Path, *, parallel: int = 4,
    train: Callable[[Work], None] = train_stacks,
) -> dict[str, str | None]:  # fmt: skip
    """Train together; return the code of the error that each ended with."""
    recipes = {trial.recipe.data_key: trial.recipe for trial in trials}
    work = Work(
        trials=trials,
        folder=folder,
        device=torch.device(trials[0].recipe.train.device),
        parallel=parallel,
        threads=None,
        datasets={key: prepare_dataset(one, quiet=True) for key, one in recipes.items()},
        progress=Progress("all", total=1, quiet=True),
        steps={},
        failures={},
    )
    train(work)
    errors = {name: error.partition(":")[0] for name, error in work.failures.items()}
    complete = [trial for trial in trials if trial.name not in errors]
    assert all(work.steps[trial.name] == trial.recipe.train.steps for trial in complete)
    return {trial.name: errors.get(trial.name) for trial in trials}


def last_step(run: Path) -> int:
    records = read_records(run / "metrics.jsonl")
    return int(records[-1]["step"]) if records else 0


def without_keys(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Leave out the bias of attention's keys, whose gradient is what rounding leaves of zero."""
    if not name.endswith("c_attn.bias") or tensor.ndim == 0:
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


def assert_alike(run: Path, alone: Path, tolerance: float = 1e-4) -> None:
    """Compare two runs without dropout: sums are in another order, which spreads on a GPU."""
    one, other = learnt(run), learnt(alone)
    assert one["step"] == other["step"] and one["recipe"] == other["recipe"]
    for number, (row, wanted) in enumerate(zip(one["metrics"], other["metrics"], strict=True)):
        near = tolerance * (1 + number)
        for key in ("step", "learning_rate"):
            assert row[key] == wanted[key]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=near)
        assert row["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=10 * near)
    for kind in ("model", "training") if one["recipe"].train.device == "cpu" else ():
        tensors, others = load(one[kind]), load(other[kind])
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            if not name.startswith("random"):
                pair = without_keys(name, tensor), without_keys(name, others[name])
                torch.testing.assert_close(*pair, rtol=1e-3, atol=2e-5, msg=name)


def before_steps(patch: Patch, look: Callable[[Learner], object]) -> None:
    """Call `look` with each learner before each of its steps, alone or in a stack."""

    def watch(kind: Any, learners: Callable[[Any], Sequence[Learner]]) -> None:
        run = kind.run

        def look_and_run(step: Any) -> Any:
            for learner in learners(step):
                look(learner)
            return run(step)

        patch.setattr(kind, "run", look_and_run)

    watch(EagerStep, lambda step: [step.learner])
    watch(GraphStep, lambda step: [step.learner])
    watch(Stack, lambda step: step.learners)


def poison(patch: Patch, *, seed: int, rate: float, step: int) -> None:
    """Have the weights of one run become NaN after `step`."""

    def poisoned(learner: Learner) -> None:
        recipe = learner.recipe
        if (recipe.seed, recipe.optimizer.learning_rate, learner.step) == (seed, rate, step):
            with torch.no_grad():
                learner.model.embed_ln.bias.fill_(float("nan"))

    before_steps(patch, poisoned)


# what runs are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [("evaluate.episodes=1",), gpu(), gpu(*EXACT)])
def test_exact_runs_have_the_bits_of_runs_alone(
    data: Path, tmp_path: Path, monkeypatch: Patch, changes: tuple[str, ...]
) -> None:
    """With dropout and evaluations, one after another."""
    place = Mock(side_effect=placement.place_table)
    trials = trials_of(data, *changes, rates=[1e-3], seeds=3)
    with monkeypatch.context() as patch:
        patch.setattr(placement, "place_table", place)
        before = torch.get_rng_state()
        errors = train_together(trials, tmp_path / "all", parallel=1)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers stay"
    assert errors == {"t0": None, "t1": None, "t2": None}
    assert place.call_count == ("train.device=cuda" in changes), "one table for all runs"
    runs = [learnt(tmp_path / "all" / trial.name) for trial in trials]
    for trial, run in zip(trials, runs, strict=True):
        assert run == learnt(train_run(trial.recipe, out=tmp_path / trial.name, quiet=True))
    assert len({run["model"] for run in runs}) == 3, "they do differ"


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ((), 1e-4),
        ((GOALS,), 1e-4),
        gpu(values=(1e-4,)),
        gpu(GOALS, values=(1e-4,)),
        gpu("train.graph=off", values=(1e-4,)),
        gpu("train.precision=bf16", "train.compile=on", values=(2e-2,)),
    ],
)
def test_stacked_runs_are_those_that_are_alone(
    data: Path, tmp_path: Path, monkeypatch: Patch, changes: tuple[str, ...], tolerance: float
) -> None:
    """Each with batches of its own strategy: drawn by weights, in an order, by the host."""
    selections = ["uniform_steps", "return_weighted", "shuffled_epochs", "stratified_return"]
    if GOALS in changes:
        columns = hopper_columns(sum(LENGTHS))
        del columns["rewards"]  # as data of goals
        data = make_dataset(tmp_path, LENGTHS, columns=columns).path
        selections[1::2] = "uniform_episodes", "uniform_steps"
    same = trials_of(data, *changes, "model.dropout=0")
    trials = [
        trial_of(trial.name, trial.recipe.replace({"selection.strategy": strategy}))
        for trial, strategy in zip(same, selections, strict=True)
    ]
    stacked, build = list[int](), Stack.__init__

    def counted(self: Stack, learners: Sequence[Learner]) -> None:
        stacked.append(len(learners))
        build(self, learners)

    monkeypatch.setattr(Stack, "__init__", counted)
    assert set(train_together(trials, tmp_path / "all").values()) == {None}
    assert stacked == [4]
    for trial in trials:
        alone = train_run(trial.recipe, out=tmp_path / trial.name, quiet=True)
        assert_alike(tmp_path / "all" / trial.name, alone, tolerance)
    assert len({learnt(tmp_path / "all" / trial.name)["model"] for trial in trials}) == 4


@pytest.mark.parametrize(
    "model",
    [
        ("model.kind=mlp", "model.dropout=0", "model.history=2"),
        ("model.kind=iql",),
        ("model.kind=iql", "model.policy=deterministic", "optimizer.clip_norm=0.5"),
        gpu("model.kind=iql"),
    ],
)
def test_other_models_are_stacked(
    data: Path, tmp_path: Path, monkeypatch: Patch, model: tuple[str, ...]
) -> None:
    """Slow critics move, losses are noted one by one, each with the rates of its own groups."""
    extras = "loader.extra_columns=next_states,terminated,has_next"
    base = tiny_recipe(data, *model, extras, "evaluate.episodes=0", "model.hidden_size=16")
    trials = [
        trial_of(f"t{n}", base.replace({"optimizer.learning_rate": 0.01 / n, "seed": n}))
        for n in (1, 2, 3)
    ]
    alone = Mock(side_effect=AssertionError("they are stacked"))
    with monkeypatch.context() as patch:
        patch.setattr(EagerStep, "run", alone)
        assert set(train_together(trials, tmp_path / "all").values()) == {None}
    for trial in trials:
        run = train_run(trial.recipe, out=tmp_path / trial.name, quiet=True)
        assert_alike(tmp_path / "all" / trial.name, run)
        rows, others = (
            read_records(path / "metrics.jsonl") for path in (tmp_path / "all" / trial.name, run)
        )
        for row, other in zip(rows, others, strict=True):
            names = row.keys() & {"value", "critic", "policy"}
            assert len(names) == (3 if "model.kind=iql" in model else 0)
            assert all(row[name] == pytest.approx(other[name], rel=1e-3) for name in names)


def test_stacked_runs_are_played_together_as_each_alone(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """One whose checkpoint cannot be read fails alone; the next call plays it, and what Ctrl-C
    left."""
    trials = trials_of(data, "evaluate.episodes=3", "evaluate.seed=5", "train.evaluate_every=10")
    count = list[int]()

    def counted(played: Sequence[Any], *words: Any) -> Any:
        count.append(len(played))
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_together(played, *words)

    def damaged(path: Path) -> Any:
        if (path.parts[-3], path.name) == ("t1", "step-00000010") and not count:
            raise one_damaged
        return find_trained(path)

    one_damaged = GearError("RUN_DAMAGED", "it is damaged")
    monkeypatch.setattr(evaluations, "evaluate_together", counted)
    monkeypatch.setattr(evaluations, "find_trained", damaged)
    with pytest.raises(TrainingInterrupted):
        train_together(trials, tmp_path)
    assert set(train_together(trials, tmp_path).values()) == {None}
    assert count == [3, 4, 4, 1]
    for trial in trials:
        file = tmp_path / trial.name / "evaluations.jsonl"
        records = list(read_lines(file, EvaluationReport))
        failed = [10] if trial.name == "t1" else []
        assert [record.step for record in records if record.error] == failed
        assert [record.step for record in records] == [*failed, 10, 20]
        alone = evaluate(tmp_path / trial.name, quiet=True)
        assert records[-1].to_json()["targets"] == alone.to_json()["targets"]


def test_runs_that_stand_at_other_steps_are_stacked_apart(data: Path, tmp_path: Path) -> None:
    """As after a kill between two checkpoints of a step."""
    trials = trials_of(data, "model.dropout=0")
    half = trials[0].recipe.replace({"train.steps": 10})
    train_run(half, out=tmp_path / "t0", quiet=True)
    assert set(train_together(trials, tmp_path).values()) == {None}
    assert [last_step(tmp_path / trial.name) for trial in trials] == [20] * 4


@pytest.mark.parametrize("changes", [(), pytest.param(CUDA, marks=[*ON_TWO_GPUS, INDUCTOR])])
def test_gpus_share_the_stacks_of_a_sweep(
    data: Path, tmp_path: Path, changes: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """A process each: runs are what they are alone, also after a stop; errors are told here."""
    if not changes:
        request.getfixturevalue("forked_workers")
    steps = () if changes else ("train.steps=200", "train.checkpoint_every=200")
    trials = trials_of(data, *changes, *steps, "model.dropout=0")
    folder, train = tmp_path / "all", partial(train_on_gpus, gpus=["0", "1"])
    names = [trial.name for trial in trials if trial.name != "t1"]

    def stop() -> None:
        while not any(last_step(folder / name) > 20 for name in names):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    folder.mkdir()
    (folder / "t1").touch()
    if not changes:
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(TrainingInterrupted):
            train_together(trials, folder, train=train)
        thread.join()
        assert any(last_step(folder / name) < 200 for name in names)
    assert train_together(trials, folder, train=train) == dict.fromkeys(names) | {
        "t1": "OUTPUT_WRITE"
    }
    for trial in trials:
        if trial.name in names:
            alone = train_run(trial.recipe, out=tmp_path / trial.name, quiet=True)
            assert_alike(folder / trial.name, alone)


# what ends them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parallel", "steps"),
    [((), 4, 20), ((), 1, 30), gpu(*EXACT, "train.checkpoint_every=10", values=(4, 99))],
)
def test_interrupted_runs_go_on_to_the_same_end(
    data: Path, tmp_path: Path, monkeypatch: Patch, changes: tuple[str, ...], parallel: int,
    steps: int,
) -> None:  # fmt: skip
    """With dropout: the state of the common random numbers is saved with every run."""
    trials = trials_of(data, *changes)
    train_together(trials, tmp_path / "whole", parallel=parallel)
    count = 0

    def interrupt(learner: Learner) -> None:
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        before_steps(patch, interrupt)
        with pytest.raises(TrainingInterrupted) as caught:
            train_together(trials, tmp_path / "parts", parallel=parallel)
    assert caught.value.code == "INTERRUPTED"
    begun = [run for run in (tmp_path / "parts").iterdir() if (run / "checkpoints").exists()]
    done, last = {learnt(run)["step"] for run in begun}, trials[0].recipe.train.steps
    assert all(0 < step <= last for step in done) and min(done) < last
    assert (len(begun), len(done)) == ((4, 1) if parallel > 1 else (2, 2))
    assert set(train_together(trials, tmp_path / "parts", parallel=parallel).values()) == {None}
    for trial in trials:
        assert learnt(tmp_path / "parts" / trial.name) == learnt(tmp_path / "whole" / trial.name)


def test_a_stop_while_runs_open_saves_nothing_of_them(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    build, count = Learner.__init__, 0

    def interrupting(self: Learner, *arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        build(self, *arguments, **options)

    monkeypatch.setattr(Learner, "__init__", interrupting)
    with pytest.raises(TrainingInterrupted):
        train_together(trials_of(data), tmp_path)
    assert count == 2, "no further run is opened"
    assert not list(tmp_path.glob("*/checkpoints/step-*"))


@pytest.mark.parametrize("parallel", [4, 1])
@pytest.mark.parametrize("changes", [(), gpu(), gpu("train.log_every=1", "train.steps=110")])
def test_a_run_that_fails_ends_alone(
    data: Path, tmp_path: Path, monkeypatch: Patch, changes: tuple[str, ...], parallel: int
) -> None:
    """A graph goes on with the run that failed, far past the end of its window of metrics."""
    trials = trials_of(data, *changes, "model.dropout=0")
    every = trials[0].recipe.train.log_every
    with monkeypatch.context() as patch:
        poison(patch, seed=1, rate=1e-3, step=every + 2)
        errors = train_together(trials, tmp_path, parallel=parallel)
    assert errors == {"t0": None, "t1": "LOSS_NONFINITE", "t2": None, "t3": None}
    assert every <= last_step(tmp_path / "t1") <= every + 2
    alone = train_run(trials[0].recipe, out=tmp_path / "alone", quiet=True)
    assert_alike(tmp_path / "t0", alone, 1e-3)
    # the one that failed goes on from its own checkpoint, alone
    assert train_together(trials[1:2], tmp_path) == {"t1": None}


def test_an_error_of_a_stack_ends_its_runs_and_no_others(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    trials = trials_of(data, "model.dropout=0")
    wide = [
        trial_of(f"w{n}", t.recipe.replace({"model.hidden_size": 32})) for n, t in enumerate(trials)
    ]
    advance = Stack.run

    def broken(self: Stack) -> Any:
        if self.learners[0].recipe.model.hidden_size == 32 and self.learners[0].step == 8:
            raise NO_MEMORY
        return advance(self)

    monkeypatch.setattr(Stack, "run", broken)
    errors = train_together([*trials, *wide], tmp_path, parallel=8)
    assert [errors[trial.name] for trial in trials] == [None] * 4
    assert [errors[trial.name] for trial in wide] == ["MEMORY"] * 4


@pytest.mark.parametrize("method", ["__init__", "run"])
def test_nothing_goes_on_after_the_gpu_is_lost_and_a_later_call_does(
    data: Path, tmp_path: Path, monkeypatch: Patch, method: str
) -> None:
    trials = trials_of(data)
    work = getattr(Stack, method)

    def broken(self: Stack, *arguments: Any) -> Any:
        if method == "__init__" or self.learners[0].step == 14:
            raise ILLEGAL
        return work(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, method, broken)
        patch.setattr(sweep_work, "_is_lost", lambda device: True)
        with one_error("DEVICE", "illegal memory access"):
            train_together(trials, tmp_path)
    assert set(train_together(trials, tmp_path).values()) == {None}


def test_a_refused_run_leaves_nothing(data: Path, tmp_path: Path) -> None:
    (trial,) = trials_of(data, "model.max_timestep=4", rates=[1e-3], seeds=1)
    assert train_together([trial], tmp_path) == {"t0": "MODEL"}
    assert list(tmp_path.iterdir()) == []


# errors in words -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NO_MEMORY, "MEMORY", "CUDA out of memory. Tried to allocate 2 GiB (one)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "MEMORY", "DefaultCPU"),
        (MemoryError(), "MEMORY", "out of memory: MemoryError"),
        (HIDDEN, "MEMORY", "out of memory"),
        (RuntimeError("\nbackend failed:\nlong"), "INTERNAL", "RuntimeError: backend failed:"),
        (ILLEGAL, "INTERNAL", "AcceleratorError: CUDA error: an illegal memory access"),
        (OSError(28, "No space left on device"), "OUTPUT_WRITE", "(folder)"),
    ],
)
def test_what_ends_one_run_is_its_error(error: Exception, code: str, words: str) -> None:
    with one_error(code) as caught, run_errors("one", Path("folder"), torch.device("cpu")):
        raise error
    assert words in str(caught.value) and "long" not in str(caught.value)


def test_a_gpu_is_lost_if_it_still_fails_after_the_error(monkeypatch: Patch) -> None:
    cuda = torch.device("cuda")

    def fails(device: torch.device) -> None:
        raise ILLEGAL

    for synchronize, code in ((lambda device: None, "INTERNAL"), (fails, "DEVICE")):
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        with one_error(code), run_errors("one", Path("folder"), cuda):
            raise ILLEGAL
