"""Checkpoints that several ranks write: whole or not there, and read by one process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DecisionTransformerModel

from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.runs import state as run_state
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.trainer import check_resumed
from gear_offline.runs.training_run import Run
from gear_offline.training import sharded_checkpoint
from gear_offline.training.checkpoint import (
    TrainingState,
    load_policy_parts,
    newest_checkpoint,
    read_checkpoint,
    read_state,
)
from gear_offline.training.checkpoint_folder import checkpoint_name, list_checkpoints
from gear_offline.training.checkpoint_writer import CheckpointWriter, Prune
from gear_offline.training.config_text import config_text
from gear_offline.training.optimizer import Optimizer
from gear_offline.training.shard_index import INDEX, read_index
from gear_offline.training.sharded_checkpoint import Piece, Shard
from gear_offline.training.tensor_file import write_tensors
from gear_offline.training.tensor_names import MODEL, TRAINING, named
from tests.damage import DAMAGE, damage
from tests.support import failing_code

RECIPE = load_recipe("smoke")
SHARDS = tuple(f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1))
FILES = ("config.json", INDEX, *SHARDS, "state.json", "training.safetensors")
STAYS = Prune(keep=9, best=None)


@pytest.fixture(scope="module")
def model() -> DecisionTransformer:
    torch.manual_seed(3)
    return build_model(state_dim=3, action_dim=2, hidden_size=8, layers=1, max_timestep=9)


def spread_tensors(model: DecisionTransformer) -> dict[str, Tensor]:
    weights = model.state_dict()
    moments = {f"optimizer/exp_avg/{name}": 2 * tensor for name, tensor in weights.items()}
    return named(MODEL, weights) | named(TRAINING, moments)


def shard(place: Path, tensors: Mapping[str, Tensor], rank: int, **options: Any) -> Shard:
    """Return a rank's half of each tensor, by rows."""
    pieces = {}
    for name, tensor in tensors.items():
        cut = (len(tensor) + 1) // 2
        part = tensor[:cut] if rank == 0 else tensor[cut:]
        if part.numel():
            offset = (rank * cut, *(0 for _ in tensor.shape[1:]))
            pieces[name] = Piece(tensor=part, offset=offset, shape=tuple(tensor.shape))
    return Shard(place=place, pieces=pieces, rank=rank, size=2, **options)


def state(step: int) -> TrainingState:
    return TrainingState(
        step=step,
        recipe=RECIPE,
        tensors={"window": torch.zeros(0, 2), "optimizer/step/w": torch.tensor(float(step))},
        loader={"step": step, "seed": 0},
        state_mean=None,
        state_std=None,
        seconds=1.0,
    )


class Ranks:
    """The writers of two ranks, and what they save."""

    def __init__(self, folder: Path, model: DecisionTransformer, *, beside: bool = True) -> None:
        self.folder, self.model = folder, model
        self.first, self.second = (
            CheckpointWriter(folder, beside=beside, before=lambda: None) for _ in range(2)
        )

    def close(self) -> None:
        self.second.close()
        self.first.close()

    def place(self, step: int) -> Path:
        return self.folder / f".partial-{checkpoint_name(step)}-mark"

    def save_first(self, step: int, *, whole: bool = False, prune: Prune = STAYS) -> None:
        mine = shard(self.place(step), spread_tensors(self.model), 0, wait_seconds=30)
        weights = self.model.state_dict() if whole else {}
        self.first.save(config_text(self.model), weights, state(step), prune, shard=mine)

    def save_second(self, step: int) -> None:
        self.second.save_shard(shard(self.place(step), spread_tensors(self.model), 1))

    def save(self, *steps: int, **options: Any) -> Path:
        for step in steps:
            self.save_second(step)
            self.save_first(step, **options)
        self.second.wait()
        self.first.wait()
        return self.folder / checkpoint_name(steps[-1])


@pytest.fixture
def ranks(tmp_path: Path, model: DecisionTransformer) -> Iterator[Ranks]:
    made = Ranks(tmp_path, model)
    yield made
    made.close()


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("whole", [False, True])
def test_what_two_ranks_save_one_process_reads(
    tmp_path: Path, model: DecisionTransformer, whole: bool, beside: bool
) -> None:
    writers = Ranks(tmp_path, model, beside=beside)
    path = writers.save(30, whole=whole)
    writers.close()
    assert sorted(os.listdir(tmp_path)) == [path.name]
    files = {*FILES, "model.safetensors"} if whole else {*FILES}
    assert set(os.listdir(path)) == files
    assert read_state(path)["format_version"] == 2
    found, expected = read_checkpoint(path), spread_tensors(model)
    tensors = named(MODEL, found.model) | named(TRAINING, found.state.tensors)
    assert tensors.keys() - expected.keys() == {"training/window", "training/optimizer/step/w"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert found.state.loader == {"step": 30, "seed": 0} and found.shards is None
    acting = load_policy_parts(path).model.state_dict()
    only = read_checkpoint(path, training=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(acting[name], tensor) and torch.equal(only.model[name], tensor)
    if whole:
        released = DecisionTransformerModel.from_pretrained(path).state_dict()
        assert all(torch.equal(released[name], t) for name, t in model.state_dict().items())


def test_ranks_leave_shards_unread(ranks: Ranks) -> None:
    path = ranks.save(30)
    found = read_checkpoint(path, shards=False)
    assert found.shards is not None and found.shards == read_state(path)["files"][INDEX]
    assert not found.model and found.state.tensors.keys() == {"window", "optimizer/step/w"}
    assert read_index(path, found.shards)["ranks"] == 2
    foreign = {**found.shards, "xxh3_128": "0"}
    assert failing_code(lambda: read_index(path, foreign)) == "CHECKPOINT_DAMAGED"


def test_what_the_model_has_besides_is_read(ranks: Ranks, model: DecisionTransformer) -> None:
    """Buffers of a sharded model are not spread; they lie beside the first rank's tensors."""
    tensors = {**state(5).tensors, "model/buffer": torch.arange(3)}
    ranks.save_second(5)
    mine = shard(ranks.place(5), spread_tensors(model), 0)
    plain = TrainingState(**{**vars(state(5)), "tensors": tensors})
    ranks.first.save(config_text(model), {}, plain, STAYS, shard=mine)
    ranks.first.wait()
    path = ranks.folder / checkpoint_name(5)
    for options in ({}, {"training": False}, {"shards": False}):
        found = read_checkpoint(path, **options)
        assert torch.equal(found.model["buffer"], torch.arange(3)), options
        assert not any(name.startswith(MODEL) for name in found.state.tensors)


def test_the_newest_stay(tmp_path: Path, ranks: Ranks) -> None:
    """Other ranks begin with the next one while the first completes one and removes others."""
    ranks.save(1, 2, 3, 4, prune=Prune(keep=2, best=1))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 3, 4]
    assert (tmp_path / "best").resolve().name == checkpoint_name(1)


@pytest.fixture(scope="module")
def saved(model: DecisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks = Ranks(folder, model)
    ranks.save(5)
    ranks.save(10, whole=True)
    ranks.close()
    return folder


@pytest.mark.parametrize("name", [*FILES, "model.safetensors"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_leads_to_the_one_before(
    tmp_path: Path, saved: Path, name: str, kind: str
) -> None:
    said: list[str] = []
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    damage(folder / checkpoint_name(10) / name, kind)
    found = newest_checkpoint(folder, said.append)
    assert found is not None and found.state.step == 5
    assert len(said) == 1 and said[0].startswith("passing over step-00000010: ")
    assert len(said[0]) > 40, "the message says why"
    below = newest_checkpoint(folder, said.append, below=10)
    assert below is not None and below.state.step == 5 and len(said) == 1
    with pytest.raises(InputError, match="none of the checkpoints is whole"):
        newest_checkpoint(folder, said.append, below=5)


@pytest.mark.parametrize("name", [INDEX, *SHARDS])
@pytest.mark.parametrize("kind", ["middle bit", "missing"])
def test_steps_of_damaged_shards_are_not_done(
    tmp_path: Path, saved: Path, name: str, kind: str
) -> None:
    """Their steps would refuse fewer, and the ranks then go on from an older checkpoint."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    (tmp_path / "recipe.yaml").write_text(RECIPE.to_yaml())
    fewer, least = (RECIPE.replace(train__steps=steps) for steps in (9, 5))
    with pytest.raises(InputError, match="but 10 steps are done"):
        check_resumed(tmp_path, fewer)
    damage(tmp_path / "checkpoints" / checkpoint_name(10) / name, kind)
    check_resumed(tmp_path, fewer)
    check_resumed(tmp_path, least)
    damage(tmp_path / "checkpoints" / checkpoint_name(5) / SHARDS[0], kind)
    with pytest.raises(InputError, match="none of the checkpoints is whole"):
        check_resumed(tmp_path, fewer)


def test_shards_of_two_checkpoints_do_not_mix(tmp_path: Path, saved: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    older, newer = (folder / checkpoint_name(step) for step in (5, 10))
    changed = {f"model/{i}": Piece(tensor=torch.ones(1), offset=(i,), shape=(2,)) for i in (0, 1)}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for rank in (0, 1):
        sharded_checkpoint.write_shard(foreign, changed, rank=rank, size=2)
    sharded_checkpoint.finish_shards(foreign, size=2)
    shutil.copy(foreign / INDEX, newer / INDEX)
    assert failing_code(lambda: read_checkpoint(newer)) == "CHECKPOINT_DAMAGED"
    assert read_checkpoint(older).state.step == 5


def test_one_that_may_not_be_read_is_not_called_damaged(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(SHARDS[1]):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        code = failing_code(lambda: newest_checkpoint(saved, lambda message: None))
    assert code == "CHECKPOINT_READ", "never passed over in favour of an old one"


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, *arguments, **options)

    monkeypatch.setattr(sharded_checkpoint, "write_tensors", refuse)


@pytest.mark.parametrize("beside", [True, False])
def test_a_full_disk_of_another_rank_ends_the_save(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    ranks = Ranks(tmp_path, model, beside=beside)
    ranks.save(5)
    full_disk(monkeypatch, SHARDS[1])

    def second() -> None:
        ranks.save_second(10)
        ranks.second.wait()

    def first() -> None:
        ranks.save_first(10)
        ranks.first.wait()

    assert failing_code(second) == "OUTPUT_WRITE"
    with pytest.raises(GearError, match=r"rank 1 could not save .*No space left") as caught:
        first()
    assert caught.value.code == "RANK_FAILED"
    assert os.listdir(tmp_path) == [checkpoint_name(5)], "nothing half written stays"
    read_checkpoint(tmp_path / checkpoint_name(5))
    ranks.close()


def test_a_full_disk_of_the_first_rank(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, SHARDS[0])
    ranks.save_first(10)
    assert failing_code(ranks.first.wait) == "OUTPUT_WRITE"
    assert os.listdir(tmp_path) == []

    def vanish(path: Path, *_: Any, **__: Any) -> Any:
        shutil.rmtree(path.parent)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(sharded_checkpoint, "write_tensors", vanish)
    ranks.save_second(10)
    with pytest.raises(GearError, match="given up") as caught:
        ranks.second.wait()
    assert caught.value.code == "RANK_FAILED"


def test_a_lost_rank_is_not_waited_for(tmp_path: Path, ranks: Ranks) -> None:
    ranks.save(5)
    ranks.save_first(10)
    learner: Any = SimpleNamespace(world=World(), recipe=RECIPE)
    run = Run(tmp_path, learner)
    run.saves = ranks.first

    def lose() -> None:
        try:
            raise GearError("RANK_LOST", "rank 1 is gone")
        finally:
            run._end()

    assert failing_code(lose) == "RANK_LOST"
    assert failing_code(ranks.first.check) == "RANK_LOST"
    assert os.listdir(tmp_path) == [checkpoint_name(5)]


def test_ranks_know_whether_they_see_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        mark = run_state.common_mark(World(), directory.path, directory.mark)
        assert mark and mark != directory.mark(), "every start has its own"
        for other in (tmp_path / "elsewhere", tmp_path):
            assert run_state.common_mark(World(), other, directory.mark) is None
        with RunDirectory(tmp_path / "copy") as copy:
            copy.mark()
            assert run_state.common_mark(World(), copy.path, directory.mark) is None
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert run_state.common_mark(World(), directory.path, directory.mark) is None


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([None, ["CHECKPOINT_READ", "no permission"]], "RANK_FAILED"),
        ([None, ["CHECKPOINT_DAMAGED", "a bit"]], ""),
        ([None, None], ""),
    ],
)
def test_what_another_rank_could_not_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], code: str
) -> None:
    path = saved / checkpoint_name(5)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, *words[1:]])
    module = torch.nn.Linear(2, 2)
    learner: Any = SimpleNamespace(
        model=module,
        world=World(nodes=(0, 0)),
        optimizer=Optimizer(module, RECIPE.optimizer, steps=3),
    )
    expected = read_state(path)["files"][INDEX]
    monkeypatch.setattr(learner.optimizer, "room", lambda names: {})
    try:
        _, problem = run_state._own_part(learner, path, expected)
    except GearError as error:
        assert error.code == code and "rank 1" in error.what
    else:
        assert not code and problem == (words[1][1] if words[1] else None)


def test_moments_of_other_parameters_are_damage(saved: Path) -> None:
    path, module = saved / checkpoint_name(5), torch.nn.Linear(2, 2)
    optimizer = Optimizer(module, RECIPE.optimizer, steps=3)
    learner: Any = SimpleNamespace(model=module, world=World(), optimizer=optimizer)
    expected = read_state(path)["files"][INDEX]
    _, problem = run_state._own_part(learner, path, expected)
    assert problem is not None and "misnames" in problem
    room = optimizer.room(["optimizer/exp_avg/weight", "window"])
    assert room.keys() == {"optimizer/exp_avg/weight"}
    assert torch.equal(room["optimizer/exp_avg/weight"], torch.zeros(2, 2))
