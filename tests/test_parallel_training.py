"""Several ranks: the batches of one, the losses of one, and a killed rank that costs nothing."""

import faulthandler
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.cli.main import main
from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import peers
from gear_offline.errors import InputError
from gear_offline.runs.loop import train_run
from gear_offline.training.pieces import check_pieces, count_pieces
from gear_offline.training.step import EagerStep
from tests.gpu_support import ON_TWO_GPUS
from tests.ranks_support import fork_ranks, launch, ranks_recipe
from tests.support import ROOT, make_dataset, one_error, write_hdf5
from tests.test_docs import blocks
from tests.training_support import measured


def test_a_failed_collective_is_a_lost_rank_and_other_errors_stay_what_they_are() -> None:
    for lost in (RuntimeError, torch.distributed.DistNetworkError):
        with one_error("RANK_LOST", "adding up: whatever torch"), peers("adding up"):
            raise lost("whatever torch says of 10.0.0.7")
    for error in (torch.OutOfMemoryError("no"), InputError("MEMORY", "no"), ValueError("no")):
        with pytest.raises(type(error), match="no"), peers("adding up"):
            raise error


def trained(
    ranks: int, recipe: Path, run: Path, steps: int, *, kill_at: int = 0, torchrun: bool = False
) -> str:
    """Train with so many ranks, of which one is killed at a step; return what they said.

    Torchrun, or else this function, begins them anew after the kill.
    """
    kill = {"KILL": f"1 {kill_at}", "FOLDER": str(run.parent)} if kill_at else {}
    words = ["-m", "tests.test_parallel_training", "train", str(recipe), f"train.steps={steps}"]
    words += ["--out", str(run), "--resume"]
    if torchrun:
        return launch(ranks, *words, restarts=1, variables=kill).stderr
    if kill:
        killed = fork_ranks(ranks, *words, variables=kill)
        assert killed.returncode == 1 and "RANK_LOST" in killed.stderr
    done = fork_ranks(ranks, *words)
    assert done.returncode == 0, done.stderr
    return done.stderr


SLOW = """
import os, sys, time
import gear_offline as go
from gear_offline.runs import data

def slow(*words, **options):
    if sys.argv[4] == "dies":
        os._exit(9)
    time.sleep(4)
    return convert(*words, **options)

convert, data.convert = data.convert, slow
try:
    go.train(sys.argv[1], {"data.path": sys.argv[2], "train.timeout": 2.5}, out=sys.argv[3])
except go.GearError as error:
    print(error.code)
"""


@pytest.mark.parametrize("first", [pytest.param("lives", marks=pytest.mark.long), "dies"])
def test_ranks_wait_for_the_first_ones_data_as_long_as_it_lives(first: str, tmp_path: Path) -> None:
    folder, source = tmp_path / "d", write_hdf5(tmp_path / "x.hdf5")
    options = f"data.source={source}", "train.steps=2"
    recipe = ranks_recipe(tmp_path / "ranks.yaml", folder, *options)
    (script := tmp_path / "slow.py").write_text(SLOW)
    done = fork_ranks(2, script, recipe, folder, tmp_path / "run", first)
    lost = first == "dies"
    assert (done.returncode, done.stdout) == (9 * lost, "RANK_LOST\n" * lost), done.stderr


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_learn_what_one_process_learns(torchrun: bool, tmp_path: Path) -> None:
    """Two ranks of which one is killed at step 14, then one process that goes on from step 20."""
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    recipe, run = ranks_recipe(tmp_path / "ranks.yaml", data), tmp_path / "run"
    alone = train_run(load_recipe(recipe, ["train.steps=30"]), out=tmp_path / "alone", quiet=True)
    said = trained(2, recipe, run, 20, kill_at=14, torchrun=torchrun)
    assert "resuming after step 10" in said
    train_run(load_recipe(recipe, ["train.steps=30"]), out=run, resume=True, quiet=True)
    one, several = measured(alone), measured(run)
    assert [record["step"] for record in several] == [5, 10, 15, 20, 25, 30]
    for mine, theirs in zip(several, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


EXTRAS = "loader.extra_columns=next_states,terminated,has_next"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mlp", ["model.dropout=0"]),
        ("decoupled", ["model.dropout=0"]),
        ("iql", [EXTRAS, "optimizer.clip_norm=0.1"]),  # groups are clipped by norms of all ranks
        ("iql", [EXTRAS, "model.policy=deterministic", "train.parallel=fsdp"]),
    ],
)
def test_other_models_learn_on_two_ranks_what_they_learn_on_one(
    kind: str, more: list[str], tmp_path: Path
) -> None:
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    changes = [f"model.kind={kind}", *more, "train.steps=5", "train.log_every=1"]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    alone = train_run(load_recipe(recipe), out=tmp_path / "alone", quiet=True)
    trained(2, recipe, tmp_path / "run", 5)
    for mine, theirs in zip(measured(tmp_path / "run"), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def bits(run: Path) -> dict[str, bytes]:
    """Return the weights and moments of a run's last checkpoint."""
    _, place = list_checkpoints(run / "checkpoints")[-1]
    tensors = load_file(place / "model.safetensors") | load_file(place / "training.safetensors")
    others = ("random/", "window", "items/", "selection/")
    return {n: v.tobytes() for n, v in tensors.items() if not n.startswith(others)}


ON_CUDA = "train.device=cuda"


@pytest.mark.parametrize(
    "more",
    [
        ["model.layers=2"],
        ["loader.padding=left", "selection.strategy=prioritized", "loader.batch_size=192"],
        pytest.param(["train.precision=bf16", "train.weights=bf16"], marks=pytest.mark.long),
        pytest.param([ON_CUDA, "train.graph=on"], marks=ON_TWO_GPUS),
        pytest.param([ON_CUDA, "train.graph=off"], marks=ON_TWO_GPUS),
    ],
)
def test_weights_have_the_same_bits_on_any_number_of_ranks(more: list[str], tmp_path: Path) -> None:
    """With dropout: one rank, and a run of two that goes on with one, and with two again."""
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    changes = ["train.deterministic=ranks", "model.dropout=0.1", *more]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    torchrun = ON_CUDA in more
    trained(1, recipe, tmp_path / "one", 20, torchrun=torchrun)
    for ranks, steps in (2, 7), (1, 13), (2, 20):
        trained(ranks, recipe, tmp_path / "several", steps, torchrun=torchrun)
    alone = bits(tmp_path / "one")
    assert len(alone) > 20
    assert bits(tmp_path / "several") == alone


NOISE = """
import random
import numpy as np, torch
from gear_offline.models.mlp import MLP

class Noise(MLP):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.register_buffer("noise", torch.zeros(facts.action_dim))

    def losses(self, batch):
        return {"action": ((self.predict(batch) - batch.actions - self.noise) ** 2).mean(-1)}

    def after_step(self):
        self.noise.normal_()%s
"""
ON_HOST = ".add_(random.random() + np.random.rand())"


@pytest.mark.parametrize(
    ("host", "more"),
    [
        (ON_HOST, []),
        pytest.param(ON_HOST, [ON_CUDA, "train.graph=off"], marks=ON_TWO_GPUS),
        pytest.param("", [ON_CUDA, "train.graph=on"], marks=ON_TWO_GPUS),
    ],
)
def test_what_a_model_draws_after_steps_is_the_same_on_any_number_of_ranks(
    host: str, more: list[str], tmp_path: Path
) -> None:
    data, torchrun = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path, bool(more)
    (tmp_path / "noise.py").write_text(NOISE % host)
    changes = ["train.deterministic=ranks", f"model.kind={tmp_path}/noise.py:Noise", *more]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    for ranks in (1, 2):
        trained(ranks, recipe, tmp_path / str(ranks), 10, torchrun=torchrun)
    one, two = (bits(tmp_path / name) for name in "12")
    assert "noise" in one and one == two


SELDOM = """
from torch import nn
from gear_offline.models.mlp import MLP

class Seldom(MLP):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.late = nn.Linear(facts.state_dim, facts.action_dim)

    def losses(self, batch):
        error, is_late = self.predict(batch) - batch.actions, batch.timesteps >= 16
        if is_late.any():
            error = error + self.late(batch.states) * is_late[..., None]
        return {"action": (error**2).mean(-1)}
"""


def test_what_windows_of_one_rank_reach_is_learnt_on_all(tmp_path: Path) -> None:
    """The first windows are steps 6, 11, 15, 17, 19, 6 of an episode: no late one on rank 0."""
    data = make_dataset(tmp_path, [20]).path
    (tmp_path / "seldom.py").write_text(SELDOM)
    changes = [f"model.kind={tmp_path}/seldom.py:Seldom", "loader.context_length=1"]
    changes += ["loader.batch_size=6", "train.deterministic=ranks", "seed=2"]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    for ranks in (1, 2):
        trained(ranks, recipe, tmp_path / str(ranks), 5)
    one, two = (bits(tmp_path / name) for name in "12")
    assert "optimizer/exp_avg/late.weight" in one and one == two


def test_parameters_that_one_rank_reaches_learn_what_they_learn_on_one(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [20]).path
    (tmp_path / "seldom.py").write_text(SELDOM)
    changes = [f"model.kind={tmp_path}/seldom.py:Seldom", "loader.context_length=1", "seed=2"]
    changes += ["loader.batch_size=6", "train.log_every=1", "model.dropout=0", "train.steps=8"]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    trained(2, recipe, tmp_path / "run", 8)
    alone = train_run(load_recipe(recipe), out=tmp_path / "alone", quiet=True)
    for mine, theirs in zip(measured(tmp_path / "run"), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    sharded = ("train.parallel=fsdp", "--out", str(tmp_path / "sharded"))
    done = fork_ranks(2, "-m", "gear_offline", "train", recipe, *sharded)
    assert done.returncode == 2 and "some ranks alone reach late.bias" in done.stderr


def test_pieces_learn_what_a_whole_batch_learns(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    whole, pieces = (
        train_run(
            load_recipe(ranks_recipe(tmp_path / "ranks.yaml", data, f"train.deterministic={mode}")),
            out=tmp_path / mode,
            quiet=True,
        )
        for mode in ("false", "ranks")
    )
    for mine, theirs in zip(measured(pieces), measured(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    with one_error("LOADER_OPTION", "4 ranks cannot share 2 pieces of 6 segments.*at most 2"):
        check_pieces(12, 4)
    assert [count_pieces(size) for size in (1, 64, 129, 192, 250)] == [1, 2, 1, 4, 2]


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_a_slow_copy_is_moved_once_an_update(parallel: str, tmp_path: Path) -> None:
    """The model of the page, on two ranks by micro-batches, then resumed: NumPy moves its copy."""
    page = blocks((ROOT / "docs" / "how-to" / "own-model.md").read_text(), "python")
    code = next(block for block in page if "class Slow" in block)
    (tmp_path / "slow.py").write_text(f"import gear_offline as go\nfrom torch import nn\n{code}")
    data, run = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path, tmp_path / "run"
    changes = [f"model.kind={tmp_path}/slow.py:Slow", f"train.parallel={parallel}"]
    changes += ["train.accumulate=2", "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    recipe = ranks_recipe(tmp_path / "ranks.yaml", data, *changes)
    trained(2, recipe, run, 2)
    trained(2, recipe, run, 4)
    places = [place for _, place in list_checkpoints(run / "checkpoints")]
    saved = [load_file(place / "model.safetensors") for place in places]
    assert len(saved) == 4
    for before, after in pairwise(saved):
        for name in ("weight", "bias"):
            slow, fast = before[f"slow.{name}"], after[f"fast.{name}"]
            moved = slow + 0.05 * (fast - slow)
            np.testing.assert_allclose(after[f"slow.{name}"], moved, rtol=1e-5, atol=1e-7)
            assert not np.array_equal(after[f"slow.{name}"], slow)


def kill_once(rank: int, step: int) -> None:
    """Make this process end itself when it has done `step`, if no other one did before."""
    advance, mark = EagerStep.run, Path(os.environ["FOLDER"]) / "killed"

    def dangerous(self: EagerStep) -> Any:
        failures = advance(self)
        if self.learner.step == step and self.learner.world.rank == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return failures

    EagerStep.run = dangerous  # type: ignore[method-assign]


if __name__ == "__main__":  # a rank, which once is killed if KILL says "RANK STEP"
    faulthandler.dump_traceback_later(200, exit=True)  # shows where a rank hangs
    if "KILL" in os.environ:
        kill_once(*map(int, os.environ["KILL"].split()))
    sys.exit(main(sys.argv[1:]))
