"""Saving from a GPU and deterministic training on one: the same bits whatever happens meanwhile."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.models.decision_transformer import build_model
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.training import saving
from gear_offline.training.checkpoint import Keep, list_checkpoints, read_checkpoint
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import read_records
from gear_offline.training.saving import Saver
from tests.checkpoint_support import StandIn
from tests.gpu_support import ON_GPU
from tests.support import make_dataset
from tests.test_resume import interrupted_in
from tests.training_support import register_importable, tiny_data, tiny_recipe

pytestmark = ON_GPU
STEPS = 40


@pytest.mark.parametrize("has_room", [True, False])
def test_the_state_of_the_call_is_written(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "ROOM_SHARE", 0.5 if has_room else 0.0)
    monkeypatch.setattr(saving, "STAGED_BYTES", 1 << 16)
    torch.manual_seed(0)
    model = build_model(state_dim=3, action_dim=2, hidden_size=64, layers=1, max_timestep=9)
    tensors = {
        "large": torch.randn(300, 1000, device="cuda"),
        "half": torch.randn(7, 33, device="cuda", dtype=torch.bfloat16),
        "strided": torch.randn(50, 60, device="cuda").T,
        "small": torch.tensor(3.0, device="cuda"),
        "empty": torch.zeros(0, 2, device="cuda"),
        "host": torch.arange(5),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    on_gpu: Any = model
    on_gpu.to("cuda")
    saver = Saver(StandIn(model, tensors).learner, tmp_path)
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # the copies are not made yet
    saver.save(seconds=1.0, keep=Keep(newest=1))
    for tensor in (*tensors.values(), *model.state_dict().values()):
        tensor.fill_(9)
    saver.wait()
    saver.close()
    saved = read_checkpoint(saver.path(0))
    for written, wanted in ((saved.tensors(), expected), (saved.weights(), weights)):
        assert written.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(written[name], tensor), name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), [30, 7, 44, 12]).path


def recipe(data: Path, *overrides: str) -> Any:
    settings = [
        *("model.hidden_size=64", "model.layers=2", "loader.context_length=8", "name=bits"),
        *("loader.batch_size=16", "optimizer.warmup_steps=5", f"train.steps={STEPS}"),
        *(f"data.path={data}", "train.device=cuda", "train.log_every=7", "evaluate.episodes=0"),
        *("train.checkpoint_every=15", "train.trackers=[]", "model.action_tanh=false"),
    ]
    return load_recipe("paper", [*settings, *overrides])


def saved(run: Path) -> dict[str, bytes]:
    _, last = list_checkpoints(run / "checkpoints")[-1]
    return {n: (last / f"{n}.safetensors").read_bytes() for n in ("model", "training")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("graph", ["on", "off"])
def test_deterministic_runs_end_in_the_same_bits(
    data: Path, tmp_path: Path, graph: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undisturbed, again, and interrupted twice and resumed; with dropout."""
    if graph == "on" and importlib.util.find_spec("cupy") is None:
        pytest.skip("needs CuPy")
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    options = (f"train.graph={graph}", f"train.precision={precision}", "train.deterministic=true")
    chosen = recipe(data, *options)
    runs = [train_run(chosen, out=tmp_path / name, quiet=True) for name in ("one", "two")]
    broken = tmp_path / "broken"
    for stop in (9, 23):
        with interrupted_in(stop), pytest.raises(TrainingInterrupted):
            train_run(chosen, out=broken, resume=stop > 9, quiet=True)
    train_run(chosen, out=broken, resume=True, quiet=True)
    assert saved(runs[0]) == saved(runs[1])
    assert saved(broken) == saved(runs[0])


def test_nothing_of_the_gpu_is_kept_by_saves(data: Path, tmp_path: Path) -> None:
    """Copies in GPU memory go back when they are written."""
    free = []
    advance = Learner.advance

    def watched(self: Learner) -> None:
        advance(self)
        if self.step in (14, 38):
            torch.cuda.synchronize()
            free.append(torch.cuda.memory_allocated())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "advance", watched)
        train_run(recipe(data, "train.graph=off"), out=tmp_path / "run", quiet=True)
    assert free[0] == pytest.approx(free[1], abs=1 << 20)


def test_background_evaluations_on_the_gpu_find_what_those_between_steps_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    data_path = tiny_data(tmp_path)
    register_importable()
    found = {}
    for how in ("on", "off"):
        options = ("train.device=cuda", "evaluate.device=cuda", f"evaluate.background={how}")
        run = train_run(tiny_recipe(data_path, *options), out=tmp_path / how, quiet=True)
        records = read_records(run / "evaluations.jsonl")
        assert all(record["device"].startswith("cuda") for record in records)
        found[how] = [(record["step"], record["targets"]) for record in records]
    assert found["on"] == found["off"] and len(found["on"]) == 3
