"""Training steps a second of IQL: ours, CORL's and d3rlpy's own code, on the same data.

``CORL`` names a checkout of https://github.com/tinkoff-ai/CORL, of which ``algorithms/offline/
iql.py`` runs as it is; d3rlpy is measured where it is installed.  All sizes are the paper's (two
layers of 256, batches of 256), on one thread of a CPU.  Each step draws its batch, too.

    python -m benchmarks.td data/hopper --steps 1000 --compare
    python -m benchmarks.td data/hopper --steps 20000 --seeds 5 --hidden 64

trains ours and CORL's from the same weights and batches, and prints how far they come apart; or
from weights and batches of their own, and plays both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

import gear_offline as go
from benchmarks.common import Call, alternate, hopper_like
from benchmarks.ogbench import text_of
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import write_file
from gear_offline.core.system import machine
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import UnavailableError
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.runs.resolve import resolve
from gear_offline.training.learner import Learner
from gear_offline.training.stack import make_step

BATCH, SCALE = 256, 1000.0  # the paper's; rewards are divided by best less worst return over it


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about a minute."""
    torch.set_num_threads(1)
    with hopper_like(quick=True) as data:
        arrays = transitions(data.dataset)
        recipe, device = our_recipe(data.dataset, 256, steps=1_000_000), torch.device("cpu")
        learner = Learner(*resolve(recipe, data.dataset, quiet=True), data.dataset, device)
        ways: dict[str, Call] = {"ours": make_step([learner]).run}
        ways["CORL"] = corl_learner(_corl(), arrays, steps=1_000_000, hidden=256)[0]
        if find_spec("d3rlpy"):
            ways["d3rlpy"] = _d3rlpy_step(arrays)
        seconds = alternate(ways, turns=2 if quick else 5, seconds=1.0 if quick else 4.0)
    rows = [{"name": name, "steps_per_second": 1 / each} for name, each in seconds.items()]
    for row in rows:
        row["ratio"] = rows[0]["steps_per_second"] / row["steps_per_second"]  # type: ignore[operator]
    return {"base": "ours", "results": rows}


def our_recipe(dataset: Dataset, hidden: int, *, steps: int, seed: int = 0) -> Recipe:
    fixed = {"data.path": str(dataset.path), "train.device": "cpu", "train.steps": steps}
    fixed |= {"train.threads": 1, "train.log_every": steps, "evaluate.episodes": 0, "seed": seed}
    return go.load_recipe("iql", fixed | {"model.hidden_size": hidden})


def transitions(dataset: Dataset) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of D4RL's ``qlearning_dataset``, rewards scaled: no step before a cut."""
    names = ("observations", "actions", "rewards")
    columns = {n: np.concatenate([r for _, r in dataset.stream(0, n)], dtype="f4") for n in names}
    ends = dataset.episodes.offsets[1:] - 1
    terminals, is_known = np.zeros(len(columns["rewards"]), bool), np.ones(ends[-1] + 1, bool)
    terminals[ends] = dataset.terminated
    is_known[ends] = dataset.terminated
    returns = dataset.returns
    columns["rewards"] = columns["rewards"] / (returns.max() - returns.min()) * SCALE
    columns["next_observations"] = np.roll(columns["observations"], -1, axis=0)
    return {n: rows[is_known] for n, rows in (columns | {"terminals": terminals}).items()}


def _corl() -> ModuleType:
    """Import its program, without what it imports to play and to log."""
    path = Path(os.environ.get("CORL", "CORL")) / "algorithms" / "offline" / "iql.py"
    if not path.is_file():
        raise UnavailableError(
            "PACKAGE_MISSING", f"no {path}", remedy="clone CORL and set CORL to its folder"
        )
    absent: dict[str, Any] = {n: ModuleType(n) for n in ("d4rl", "gym", "pyrallis", "wandb")}
    for module in absent.values():
        module.Env, module.wrap = object, lambda: lambda function: function
    spec = spec_from_file_location("corl_iql", path)
    assert spec is not None and spec.loader is not None, "a Python file"
    peer = module_from_spec(spec)
    with mock.patch.dict(sys.modules, absent | {spec.name: peer}):
        spec.loader.exec_module(peer)
    return peer


def corl_learner(
    peer: Any, arrays: dict[str, Any], *, steps: int, hidden: int
) -> tuple[Callable[[], Any], Any, Any]:
    """Return its step, its policy, and the mean and deviation of its states, made as it does."""
    mean, deviation = peer.compute_mean_std(arrays["observations"], eps=1e-3)
    both = ("observations", "next_observations")
    arrays = arrays | {n: peer.normalize_states(arrays[n], mean, deviation) for n in both}
    sizes = [arrays[name].shape[1] for name in ("observations", "actions")]
    buffer = peer.ReplayBuffer(*sizes, len(arrays["rewards"]))
    buffer.load_d4rl_dataset(arrays)
    trainer = _trainer(peer, sizes, steps, hidden)
    return lambda: trainer.train(buffer.sample(BATCH)), trainer.actor, (mean, deviation)


def _trainer(peer: Any, sizes: Sequence[int], steps: int, hidden: int) -> Any:
    critics, value = peer.TwinQ(*sizes, hidden), peer.ValueFunction(sizes[0], hidden)
    actor = peer.GaussianPolicy(*sizes, 1.0, hidden)
    optimizers = [torch.optim.Adam(net.parameters(), lr=3e-4) for net in (actor, critics, value)]
    return peer.ImplicitQLearning(
        *(1.0, actor, optimizers[0], critics, optimizers[1], value, optimizers[2]),
        **{"max_steps": steps, "iql_tau": 0.7, "beta": 3.0},
    )


def _d3rlpy_step(arrays: dict[str, Any]) -> Callable[[], Any]:
    import d3rlpy

    ends = arrays["terminals"].copy()
    ends[-1] = True
    named = {name: arrays[name] for name in ("observations", "actions", "rewards")}
    buffer = d3rlpy.dataset.MDPDataset(**named, terminals=ends.astype(np.float32))
    learner = d3rlpy.algos.IQLConfig(batch_size=BATCH).create(device="cpu:0")
    learner.build_with_dataset(buffer)
    return lambda: learner.update(buffer.sample_transition_batch(BATCH))


class _Actor:
    """CORL's policy, as `evaluate_tasks` asks it to act."""

    def __init__(self, policy: Any, scale: Any) -> None:
        self._policy, self._scale = policy.eval(), scale

    def reset(self, indices: Any, targets: Any) -> None: ...

    def observe_reward(self, rewards: Any, indices: Any = None) -> None: ...

    def act(self, observations: Any, indices: Any = None) -> Any:
        mean, deviation = self._scale
        states = torch.from_numpy(((observations - mean) / deviation).astype(np.float32))
        with torch.no_grad():
            return self._policy(states).mean.clamp(-1, 1).numpy()


def play(path: Path, *, seed: int, steps: int, hidden: int, episodes: int) -> dict[str, Any]:
    """Train both from a seed; return the mean return of each policy in the same episodes."""
    dataset = go.open_dataset(path)
    assert dataset.environment_id is not None, "of the data"
    with tempfile.TemporaryDirectory() as folder:
        own = go.train(our_recipe(dataset, hidden, steps=steps, seed=seed), out=folder, quiet=True)
        ours = go.evaluate(own, episodes=episodes, quiet=True, out=Path(folder) / "played.json")
    torch.manual_seed(seed)
    np.random.seed(seed)
    step, actor, scale = corl_learner(_corl(), transitions(dataset), steps=steps, hidden=hidden)
    for _ in range(steps):
        step()
    task = EvaluationTask(environment=dataset.environment_id, targets=(0.0,), episodes=episodes)
    peer = evaluate_tasks(lambda _: _Actor(actor, scale), [task])
    return {"ours": ours.mean_return, "CORL": peer.mean_return}


def compare(path: Path, *, steps: int, hidden: int) -> None:
    """Train both from the same weights on the same batches; print how far they come apart."""
    source, names = go.open_dataset(path), ("observations", "actions", "rewards")
    columns = {n: np.concatenate([rows for _, rows in source.stream(0, n)]) for n in names}
    columns["next_observations"] = np.roll(columns["observations"], -1, axis=0)  # of cuts, too
    ends, columns["terminals"] = source.episodes.offsets[1:] - 1, np.zeros(len(columns["rewards"]))
    columns["terminals"][ends] = source.terminated
    columns["timeouts"] = np.zeros(len(columns["rewards"]))
    columns["timeouts"][ends] = ~source.terminated
    with tempfile.TemporaryDirectory() as folder:
        go.convert(go.from_arrays(columns), Path(folder) / "data", quiet=True)
        dataset = go.open_dataset(Path(folder) / "data")
        recipe = our_recipe(dataset, hidden, steps=steps)
        learner = Learner(*resolve(recipe, dataset, quiet=True), dataset, torch.device("cpu"))
        model: Any = learner.model
        trainer = _trainer(_corl(), (model.facts.state_dim, model.facts.action_dim), steps, hidden)
        pairs = [(model.policy, trainer.actor), (model.value, trainer.vf)]
        for ours, theirs in ((model.critics, trainer.qf), (model.slow, trainer.q_target)):
            pairs += [(ours[0], theirs.q1), (ours[1], theirs.q2)]
        weights = [
            both
            for ours, theirs in pairs
            for both in zip(ours.parameters(), _maps(theirs), strict=True)
        ]
        for own, other in weights:
            other.data.copy_(own.data)
        losses = list[tuple[float, float]]()
        for number in range(1, steps + 1):
            batch = learner.begin_step()
            extras, rewards = batch.extras, batch.rewards / model.settings.reward_scale
            rows = [batch.states, batch.actions, rewards, extras["next_states"]]
            told = trainer.train([*(each[:, 0] for each in rows), extras["terminated"].float()])
            loss = model.loss(batch)
            loss.backward()
            learner.finish_step(loss.detach())
            losses.append((loss.item(), sum(told.values())))
            if number in (1, 10, 100, steps) or number % 1000 == 0:
                gap = max(float((own - other).abs().max()) for own, other in weights)
                own_loss, other_loss = np.mean(losses[-100:], axis=0)
                print(f"step {number:,}: loss {own_loss:.6f} ours, {other_loss:.6f} CORL's, "
                      f"weights {gap:.1e}", flush=True)  # fmt: skip


def _maps(network: Any) -> list[Any]:
    return [p for name, p in network.named_parameters() if name != "log_std"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train ours and CORL's, and play both")
    parser.add_argument("data", type=Path)
    for name, count in {"steps": 20_000, "seeds": 5, "hidden": 64, "episodes": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--compare", action="store_true", help="same weights, same batches")
    parser.add_argument("--out", type=Path, default=Path("td-returns.json"))
    chosen = vars(parser.parse_args())
    torch.set_num_threads(1)
    out, path, seeds = (chosen.pop(name) for name in ("out", "data", "seeds"))
    if chosen.pop("compare"):
        compare(path, steps=chosen["steps"], hidden=chosen["hidden"])
        sys.exit()
    runs = list[dict[str, Any]]()
    for seed in range(seeds):
        runs.append(play(path, seed=seed, **chosen))
        print(f"seed {seed}: {runs[-1]}", flush=True)
        document = {"machine": machine(), **chosen, "results": runs}
        write_file(out, json.dumps(document, indent=1).encode())
    for name in runs[0]:
        print(f"{name}: {text_of([run[name] for run in runs], 0, 1.0)}")
