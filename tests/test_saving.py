"""Saving while training goes on: what is written is the instant of the call; full and bad disks."""

import errno
import importlib.util
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from gear_offline.artifacts.checkpoint import Keep, list_checkpoints, read_checkpoint
from gear_offline.config.recipe import load_recipe
from gear_offline.errors import GearError
from gear_offline.models.decision_transformer import build_model
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.training import saving
from gear_offline.training.saving import Saver
from gear_offline.training.step import EagerStep
from tests.checkpoint_support import StandIn
from tests.gpu_support import NEEDS_GPU, ON_GPU
from tests.support import failing_code, last_words, make_dataset, one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt, tiny_data, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")


@pytest.fixture
def stand_in() -> StandIn:
    model = build_model(state_dim=3, action_dim=2, hidden_size=8, layers=1, max_timestep=9)
    return StandIn(model, {"optimizer/m": torch.full((2,), 5.0)})


@pytest.fixture
def saver(tmp_path: Path, stand_in: StandIn) -> Iterator[Saver]:
    made = Saver(stand_in.learner, tmp_path / "checkpoints")
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the writer before its first byte until the event is set."""
    event, write = threading.Event(), save_file

    def held(*arguments: Any, **options: Any) -> Any:
        assert event.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", held)
    return event


@pytest.mark.parametrize(
    ("device", "room"), [("cpu", 0.5), *(pytest.param("cuda", n, marks=ON_GPU) for n in (0.5, 0.0))]
)
def test_the_state_of_the_call_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, device: str, room: float
) -> None:
    monkeypatch.setattr(saving, "ROOM_SHARE", room)
    monkeypatch.setattr(saving, "STAGED_BYTES", 1 << 16)
    model: Any = build_model(state_dim=3, action_dim=2, hidden_size=64, layers=1, max_timestep=9)
    model.to(device)
    tensors = {
        "large": torch.randn(300, 1000, device=device),
        "half": torch.randn(7, 33, device=device, dtype=torch.bfloat16),
        "strided": torch.randn(50, 60, device=device).T,
        "small": torch.tensor(3.0, device=device),
        "empty": torch.zeros(0, 2, device=device),
        "host": torch.arange(5),
    }
    learner = StandIn(model, tensors)
    learner.step = 4
    saver, parts = Saver(learner.learner, tmp_path), (tensors, model.state_dict())
    expected = [{name: tensor.cpu().clone() for name, tensor in some.items()} for some in parts]
    if device == "cuda":  # the copies are not made yet
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    saver.save(seconds=2.5, keep=Keep(newest=2))
    for tensor in (*tensors.values(), *model.state_dict().values()):  # training goes on
        tensor.fill_(9)
    assert saver.has(4) and not saver.path(4).exists() and not saver.has(5)
    gate.set()
    saver.wait()
    saver.close()
    saved = read_checkpoint(saver.path(4))
    assert (saved.state.seconds, saved.state.loader) == (2.5, {"step": 4})
    for written, wanted in zip((saved.tensors(), saved.weights()), expected, strict=True):
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())


def test_one_save_at_a_time(saver: Saver, stand_in: StandIn, gate: threading.Event) -> None:
    """The second save returns only when the first one is on the disk."""
    stand_in.step = 1
    saver.save(seconds=1.0, keep=Keep(newest=2))
    threading.Timer(0.2, gate.set).start()
    stand_in.step = 2
    saver.save(seconds=1.0, keep=Keep(newest=2))
    assert saver.path(1).is_dir() and saver.stalled_seconds > 0.1
    for step in (3, 4):
        stand_in.step = step
        saver.save(seconds=1.0, keep=Keep(newest=1, best=2, pinned=(3,)))
    saver.save(seconds=1.0, keep=Keep(newest=1, best=3))  # is there: prunes
    saver.wait()
    folder = saver.path(1).parent
    assert [step for step, _ in list_checkpoints(folder)] == [3, 4]
    assert (folder / "best").resolve() == saver.path(3).resolve()


def test_a_limit_of_file_size_is_an_error_of_the_disk(saver: Saver) -> None:
    """The system says it to the safetensors library, which says it as text."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        saver.save(seconds=1.0, keep=Keep(newest=1))
        with pytest.raises(GearError, match="no space left") as caught:
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "OUTPUT_WRITE"
    assert os.listdir(saver.path(0).parent) == []


def test_an_error_of_the_last_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Path:
        raise GearError("OUTPUT_WRITE", "no space left")

    monkeypatch.setattr(saving, "write_checkpoint", refuse)
    recipe = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0", "train.steps=5")
    code = failing_code(lambda: train_run(recipe, out=tmp_path / "run", quiet=True))
    assert code == "OUTPUT_WRITE" and not (tmp_path / "run" / "summary.json").exists()


def failing(original: Callable[..., Any], number: int, after: int) -> Callable[..., Any]:
    """Return `original`, which fails from its call `after` on."""
    calls = 0

    def call(*values: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise OSError(number, os.strerror(number))
        return original(*values, **options)

    return call


@pytest.fixture(scope="module")
def begun(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "begun"
    return train_run(tiny_recipe(data, "train.steps=7"), out=out, quiet=True)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "save_file"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_run_on_a_bad_disk_is_one_error_and_goes_on_later(
    data: Path, begun: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    call: str, number: int,
) -> None:  # fmt: skip
    run = Path(shutil.copytree(begun, tmp_path / "run", symlinks=True))
    before = [step for step, _ in list_checkpoints(run / "checkpoints")]
    with monkeypatch.context() as patched:
        place: Any = safetensors.torch if call == "save_file" else os
        refuse = failing(getattr(place, call), number, 2 if call == "fsync" else 1)
        patched.setattr(place, call, refuse)
        with pytest.raises(GearError) as caught:
            train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert (caught.value.code, caught.value.exit_code) == ("OUTPUT_WRITE", 1)
    assert str(run) in str(caught.value) and caught.value.remedy
    assert "gear-saver" not in [thread.name for thread in threading.enumerate()]
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == before
    train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    found, expected = learnt(run), learnt(whole)
    assert (found["model"], found["training"]) == (expected["model"], expected["training"])
    assert not list((run / "checkpoints").glob(".*"))


def test_metrics_that_cannot_be_written_are_one_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = os.write

    def full(file: int, content: bytes) -> int:
        if b'"loss"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    run = tmp_path / "run"
    with one_error("OUTPUT_WRITE", rf"no space left: .* \({run}\);"):
        train_run(tiny_recipe(data), out=run, quiet=True)
    assert capfd.readouterr().err == ""


# on a GPU -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), [30, 7, 44, 12]).path


def recipe(data: Path, *overrides: str) -> Any:
    settings = [
        *("model.hidden_size=64", "model.layers=2", "loader.context_length=8", "name=bits"),
        *("loader.batch_size=16", "optimizer.warmup_steps=5", "train.steps=40"),
        *(f"data.path={data}", "train.device=cuda", "train.log_every=7", "evaluate.episodes=0"),
        *("train.checkpoint_every=15", "train.trackers=[]", "model.action_tanh=false"),
    ]
    return load_recipe("paper", last_words(*settings, *overrides))


def saved(run: Path) -> dict[str, bytes]:
    _, last = list_checkpoints(run / "checkpoints")[-1]
    return {n: (last / f"{n}.safetensors").read_bytes() for n in ("model", "training")}


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("graph", ["on", "off"])
def test_deterministic_runs_end_in_the_same_bits(
    long_data: Path, tmp_path: Path, graph: str, precision: str
) -> None:
    """Undisturbed, again, and interrupted twice and resumed; with dropout."""
    if graph == "on" and importlib.util.find_spec("cupy") is None:
        pytest.skip("needs CuPy")
    options = (f"train.graph={graph}", f"train.precision={precision}", "train.deterministic=true")
    chosen = recipe(long_data, *options)
    runs = [train_run(chosen, out=tmp_path / name, quiet=True) for name in ("one", "two")]
    broken = tmp_path / "broken"
    for stop in (9, 23):
        with interrupted_in(stop), pytest.raises(TrainingInterrupted):
            train_run(chosen, out=broken, resume=stop > 9, quiet=True)
    train_run(chosen, out=broken, resume=True, quiet=True)
    assert saved(runs[0]) == saved(runs[1])
    assert saved(broken) == saved(runs[0])


@NEEDS_GPU
@pytest.mark.gpu
def test_nothing_of_the_gpu_is_kept_by_saves(long_data: Path, tmp_path: Path) -> None:
    """Copies in GPU memory go back when they are written."""
    free = []
    advance = EagerStep.run

    def watched(self: EagerStep) -> Any:
        failures = advance(self)
        if self.learner.step in (14, 38):
            torch.cuda.synchronize()
            free.append(torch.cuda.memory_allocated())
        return failures

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EagerStep, "run", watched)
        train_run(recipe(long_data, "train.graph=off"), out=tmp_path / "run", quiet=True)
    assert free[0] == pytest.approx(free[1], abs=1 << 20)
