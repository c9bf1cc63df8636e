"""Our goal-conditioned cloning beside OGBench's own, in JAX, on the data of benchmarks.ogbench.

    pip install ogbench jax flax optax distrax ml_collections
    python -m benchmarks.gcbc pointmaze-medium-navigate --sdist ogbench-1.2.2 --steps 1000
    python -m benchmarks.gcbc pointmaze-medium-navigate --sdist ogbench-1.2.2 --play --seeds 8

Without `--play` both learn from the same first weights and the same batches, on a CPU in float32;
it prints how far losses and weights lie apart.  With `--play` its learner trains on batches that it
draws itself and plays by its own evaluation: a row for `benchmarks.ogbench_page`.
"""

import argparse
import json
import os
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_offline as go
from benchmarks.ogbench import CACHE, COMMON, EPISODES, MODELS, converted, listed, make, text_of
from gear_offline.core.files import write_file
from gear_offline.core.system import machine, usable_cores
from gear_offline.runs.resolve import resolve
from gear_offline.training.learner import Learner

PRINTED = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # and thousands


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


def play(
    name: str, source: Path, impls: Path, steps: int, episodes: int, seed: int
) -> dict[str, Any]:
    """Train its learner as its `main.py` does; return what its evaluation gives."""
    sys.path.insert(0, str(impls))
    jax, ogbench = import_module("jax"), import_module("ogbench")
    module, config = import_module("utils.datasets"), import_module("agents.gcbc").get_config()
    columns = ogbench.load_dataset(source, compact_dataset=True)
    environment = ogbench.make_env_and_datasets(f"{name}-v0", env_only=True)
    dataset = module.GCDataset(module.Dataset.create(**columns), config)
    np.random.seed(seed)
    agent, errors = _agent(seed, dataset.sample(1)), deque[Any](maxlen=1000)
    for _ in range(steps):
        agent, info = agent.update(dataset.sample(config["batch_size"]))
        errors.append(info["actor/mse"])
    agent = jax.device_put(agent, jax.devices("cpu")[0])
    evaluate, shares = import_module("utils.evaluation").evaluate, list[float]()
    for task in range(1, 1 + len(environment.unwrapped.task_infos)):
        how = {"task_id": task, "config": config, "num_eval_episodes": episodes}
        shares.append(float(evaluate(agent=agent, env=environment, **how)[0]["success"]))
    return {"tasks": shares, "loss": float(np.mean(errors))}


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
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        source, seeds = make(chosen.set, chosen.sdist, chosen.cache), listed(chosen.seeds)
        with ProcessPoolExecutor(min(len(seeds), usable_cores()), get_context("spawn")) as pool:
            job = (chosen.set, source, impls, chosen.steps, chosen.episodes)
            results = [pool.submit(play, *job, seed) for seed in seeds]
            runs = [result.result() for result in results]
        row = {"set": chosen.set, "model": "gcbc of OGBench", "steps": chosen.steps}
        row |= {"seeds": seeds, "success": [float(np.mean(run["tasks"])) for run in runs]}
        row |= {key: [run[key] for run in runs] for key in ("tasks", "loss")}
        document = {"machine": machine(), "results": [row]}
        write_file(chosen.out, json.dumps(document, indent=1).encode())
        print(f"{chosen.set}, {row['model']}: {text_of(row['success'])}")
    else:
        data = converted(chosen.set, chosen.sdist, chosen.cache)
        compare(data, chosen.steps, words, same_weights=not chosen.own_weights)
