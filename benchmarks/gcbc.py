"""Our goal-conditioned cloning beside OGBench's own, in JAX, on the data of benchmarks.ogbench.

    pip install ogbench jax flax optax distrax ml_collections
    python -m benchmarks.gcbc pointmaze-medium-navigate --sdist ogbench-1.2.2 --steps 1000
    python -m benchmarks.gcbc pointmaze-medium-navigate --sdist ogbench-1.2.2 --play --steps 100000

Without `--play` both learn from the same first weights and the same batches, on a CPU in float32;
it prints how far losses and weights lie apart.  With `--play` its learner trains, on a GPU if JAX
has one, on batches that it draws itself; saved in a folder beside `--out`, it plays by its own
evaluation on CPUs: a row for `benchmarks.ogbench_page`.
"""

import argparse
import json
import os
import shlex
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import gear_offline as go
from benchmarks.ogbench import CACHE, COMMON, EPISODES, MODELS, converted, listed, make, text_of
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine, usable_cores, versions
from gear_offline.runs.resolve import resolve
from gear_offline.training.learner import Learner

PRINTED = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # and thousands
SCANNED = 100  # steps a call
TASKS = 5  # of each set


def compare(data: Path, steps: int, words: list[str], *, same_weights: bool) -> None:
    """Train both side by side; print losses, and the greatest difference of weights."""
    fixed = {"data.path": data, "train.steps": steps, "train.log_every": steps}
    fixed |= {"train.device": "cpu", "evaluate.episodes": 0}
    recipe = go.load_recipe(go.load_recipe("paper", COMMON | MODELS["gcbc"] | fixed), words)
    dataset = go.open_dataset(data)
    learner = Learner(*resolve(recipe, dataset, quiet=True), dataset, torch.device("cpu"))
    layers = [layer for layer in learner.model.layers if isinstance(layer, torch.nn.Linear)]
    agent, losses = None, list[tuple[float, float]]()
    for step in range(1, steps + 1):
        batch = learner.begin_step()
        names = {"observations": batch.states, "actions": batch.actions, "actor_goals": batch.goals}
        arrays = {name: tensor[:, 0].numpy() for name, tensor in names.items()}
        if agent is None:
            agent = _agent(recipe.seed, arrays)
            if same_weights:
                for layer, theirs in zip(layers, _maps(agent), strict=True):
                    layer.weight.data = torch.tensor(theirs["kernel"].T.copy())
                    layer.bias.data = torch.tensor(theirs["bias"])
        agent, info = agent.update(arrays)
        loss = learner.model.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.finish_step(loss.detach())
        losses.append((float(loss.detach()), float(info["actor/mse"])))
        if step in PRINTED or step % 1000 == 0:
            own, other = np.mean(losses[-100:], axis=0)
            pairs = zip(layers, _maps(agent), strict=True)
            gap = max(np.abs(o.weight.detach().numpy() - t["kernel"].T).max() for o, t in pairs)
            line = f"step {step:6,}: loss {own:.7f} ours, {other:.7f} its own, weights {gap:.1e}"
            print(line, flush=True)


def _agent(seed: int, batch: dict[str, Any]) -> Any:
    gcbc = import_module("agents.gcbc")
    ends = batch["observations"][:1], batch["actions"][:1]
    return gcbc.GCBCAgent.create(seed, *ends, gcbc.get_config())


def _maps(agent: Any) -> list[dict[str, Any]]:
    actor = agent.network.params["modules_actor"]
    maps = [*(actor["actor_net"][f"Dense_{n}"] for n in range(3)), actor["mean_net"]]
    return [{key: np.array(value) for key, value in each.items()} for each in maps]


def train(source: Path, impls: Path, steps: int, folder: Path, seed: int) -> float:
    """Train its learner as its `main.py` does and save it; return the error of the last steps.

    Its update is compiled with a loop around it, so that Python is not waited for at each step.
    """
    sys.path.insert(0, str(impls))
    jax, ogbench = import_module("jax"), import_module("ogbench")
    module, config = import_module("utils.datasets"), import_module("agents.gcbc").get_config()
    columns = ogbench.load_dataset(source, compact_dataset=True)
    dataset = module.GCDataset(module.Dataset.create(**columns), config)
    np.random.seed(seed)
    agent, errors = _agent(seed, dataset.sample(1)), deque[Any](maxlen=1000 // SCANNED)
    advance = jax.jit(lambda agent, batches: jax.lax.scan(type(agent).update, agent, batches))
    for done in range(0, steps, SCANNED):
        count = min(SCANNED, steps - done)
        batches = [dataset.sample(config["batch_size"]) for _ in range(count)]
        agent, info = advance(agent, jax.tree.map(lambda *each: np.stack(each), *batches))
        errors.append(info["actor/mse"])
    import_module("utils.flax_utils").save_agent(agent, str(folder), seed)
    return float(np.mean(np.concatenate(errors)))


def play(name: str, impls: Path, episodes: int, folder: Path, seed: int, task: int) -> float:
    """Return its share of successes in a task by its own evaluation, on a CPU."""
    sys.path.insert(0, str(impls))
    environment = import_module("ogbench").make_env_and_datasets(f"{name}-v0", env_only=True)
    spaces = environment.observation_space, environment.action_space
    observations, actions = (space.sample()[None] for space in spaces)
    agent = _agent(seed, {"observations": observations, "actions": actions})
    agent = import_module("utils.flax_utils").restore_agent(agent, str(folder), seed)
    environment.reset(seed=seed * TASKS + task)
    np.random.seed(seed * TASKS + task)
    config = import_module("agents.gcbc").get_config()
    how = {"task_id": task, "config": config, "num_eval_episodes": episodes}
    evaluate = import_module("utils.evaluation").evaluate
    return float(evaluate(agent=agent, env=environment, **how)[0]["success"])


def measure(
    name: str,
    sdist: Path,
    impls: Path,
    steps: int,
    episodes: int,
    seeds: list[int],
    cache: Path,
    out: Path,
) -> dict[str, Any]:
    """Train and play seeds of its learner side by side; one that is trained is only played."""
    folder, commit = out.with_suffix(""), clean_commit()
    what: dict[str, Any] = {"set": name, "model": "gcbc of OGBench", "steps": steps, "seeds": seeds}
    if not (path := folder / "trained.json").exists():
        source = make(name, sdist, cache)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with ProcessPoolExecutor(min(len(seeds), usable_cores()), get_context("spawn")) as pool:
            losses = [*pool.map(partial(train, source, impls, steps, folder), seeds)]
        digest = xxhash.xxh3_128_hexdigest(source.read_bytes())
        facts = {"commit": commit, "machine": _machine(), "digest": digest, "loss": losses}
        write_file(path, json.dumps(what | facts, indent=1).encode())
    trained = json.loads(path.read_text())
    if any(trained[key] != value for key, value in what.items()):
        raise SystemExit(f"{path}: of another set, steps or seeds; name another --out")
    os.environ["JAX_PLATFORMS"] = "cpu"
    turns = [(seed, task) for seed in seeds for task in range(1, TASKS + 1)]
    with ProcessPoolExecutor(min(len(turns), usable_cores()), get_context("spawn")) as pool:
        shares = [
            *pool.map(partial(play, name, impls, episodes, folder), *zip(*turns, strict=True))
        ]
    tasks = np.reshape(shares, (len(seeds), TASKS))
    outcome = {"success": tasks.mean(1).tolist(), "tasks": tasks.tolist(), "loss": trained["loss"]}
    row = what | {"digest": trained["digest"]} | outcome
    command = f"python -m benchmarks.gcbc {shlex.join(sys.argv[1:])}"
    document: dict[str, Any] = {
        "commit": commit,
        "command": command,
        "machine": _machine(),
        "trained": trained,
    }
    document |= {
        "ogbench": sdist.name.removeprefix("ogbench-"),
        "episodes": episodes,
        "results": [row],
    }
    write_file(out, json.dumps(document, indent=1).encode())
    return row


def _machine() -> dict[str, Any]:
    described = machine()
    described["versions"] |= versions("jax", "flax", "optax", "distrax")
    return described


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="options of the recipe may follow: KEY=VALUE")
    parser.add_argument("set")
    parser.add_argument("--sdist", type=Path, required=True, help="unpacked sdist of ogbench")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--own-weights", action="store_true", help="begin with weights of our own")
    parser.add_argument("--play", action="store_true")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8], help="their number, or each")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=Path("gcbc.json"))
    chosen, words = parser.parse_known_args()
    sys.path.insert(0, str(impls := chosen.sdist.absolute() / "impls"))
    if chosen.play:
        row = measure(
            chosen.set,
            chosen.sdist.absolute(),
            impls,
            chosen.steps,
            chosen.episodes,
            listed(chosen.seeds),
            chosen.cache,
            chosen.out,
        )
        print(f"{chosen.set}, {row['model']}: {text_of(row['success'])}")
    else:
        data = converted(chosen.set, chosen.sdist, chosen.cache)
        compare(data, chosen.steps, words, same_weights=not chosen.own_weights)
