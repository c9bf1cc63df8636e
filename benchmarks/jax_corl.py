"""Training steps a second of JAX-CORL's Decision Transformer and of ours, on the same data.

``JAX_CORL`` names a checkout of https://github.com/nissymori/JAX-CORL; jax, flax, optax and
omegaconf must be there.  Three ways to run its own functions: its loop as it is (a Python loop of
two jitted calls, trajectories as NumPy arrays), trajectories on the device and the loop as one
``lax.scan``, and that for eight seeds under ``vmap``; the scans also with all its weights, moments
and data cast to bfloat16, for which its code has no option.  Sizes are the paper's (128 wide, 3
layers, windows of 20, batches of 64, dropout 0.1); its products run in JAX's default precision.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.common import Data, alternate, hopper_like, need_cuda
from benchmarks.train import OURS, paper_learner
from gear_offline.errors import UnavailableError
from gear_offline.training.stack import make_step

SEEDS = 8
COMPILED = "one graph, compiled, bf16"
SINGLE = ("train.graph=on", "train.compile=on", "train.precision=fp32")


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; more than five minutes, most of them compiling: each rate is told as it comes."""
    need_cuda()
    peer = _peer()
    steps, turns = (200, 3) if quick else (1000, 5)
    rows = []
    with hopper_like(quick=quick) as data:
        for name, options in ((COMPILED, OURS[COMPILED]), ("one graph, compiled, fp32", SINGLE)):
            step = make_step([paper_learner(data.dataset, options)])
            step.run()
            ours = alternate({name: step.run}, turns=turns, seconds=1.0)[name]
            rows.append({"name": f"ours, {name}", "steps_per_second": 1 / ours})
        stack = make_step(
            [paper_learner(data.dataset, OURS[COMPILED], seed=n) for n in range(SEEDS)]
        )
        together = alternate({"stack": stack.run}, turns=turns, seconds=1.0)["stack"]
        name = f"ours, {SEEDS} seeds stacked, in sum"
        rows.append({"name": name, "steps_per_second": SEEDS / together})
        for name, rate in _rates(peer, _trajectories(peer, data), steps, turns).items():
            rows.append({"name": name, "steps_per_second": rate})
    for row in rows:
        row["ratio"] = row["steps_per_second"] / rows[0]["steps_per_second"]  # type: ignore[operator]
    return {"base": rows[0]["name"], "results": rows}


def _peer() -> ModuleType:
    """Import its program, without the simulators and the tracker that it also imports."""
    path = Path(os.environ.get("JAX_CORL", "JAX-CORL")) / "algos" / "dt.py"
    if not path.is_file():
        raise UnavailableError(
            "PACKAGE_MISSING", f"no {path}", remedy="clone JAX-CORL and set JAX_CORL to its folder"
        )
    for name in ("d4rl", "gym", "wandb"):
        module = sys.modules.setdefault(name, ModuleType(name))
        module.Env = object  # type: ignore[attr-defined]
    arguments, sys.argv = sys.argv, [str(path), "env_name=hopper-medium-v2"]  # it reads sys.argv
    try:
        spec = spec_from_file_location("jax_corl_dt", path)
        assert spec is not None and spec.loader is not None, "a Python file"
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module


def _trajectories(peer: ModuleType, data: Data) -> Any:
    """Return the data as it pads them: one array a field, episodes by longest."""
    lengths = np.diff(data.offsets)
    place = np.arange(lengths.max())
    rows = np.minimum(data.offsets[:-1, None] + place, len(data.rewards) - 1)
    there = place < lengths[:, None]
    returns = data.returns_to_go[rows] / 1000 * there
    return lengths, peer.Trajectory(
        timesteps=np.broadcast_to(place, rows.shape) * there,
        states=data.states[rows] * there[..., None],
        actions=data.actions[rows] * there[..., None],
        returns_to_go=returns[..., None].astype(np.float32),
        masks=there.astype(np.float32),
    )


def _rates(peer: ModuleType, data: Any, steps: int, turns: int) -> dict[str, float]:
    import jax

    lengths, trajectories = data
    config = peer.config
    options = (config.batch_size, config.context_len, len(lengths))
    on_device, sizes = jax.device_put(trajectories), jax.numpy.array(lengths)

    def sample(key: Any, source: Any) -> Any:
        return peer.sample_traj_batch(key, source, *options, sizes)

    def start(key: Any) -> Any:
        return peer.create_dt_train_state(key, 11, 3, config)

    def step(carried: Any, _: None) -> Any:
        state, key = carried
        key, data_key, update_key = jax.random.split(key, 3)
        state, loss = peer.DT.update(state, sample(data_key, on_device), update_key)
        return (state, key), loss

    def scan(state: Any, key: Any) -> Any:
        return jax.lax.scan(step, (state, key), None, steps)[1]

    update = jax.jit(peer.DT.update)

    def loop() -> Any:
        state, key, loss = start(jax.random.PRNGKey(0)), jax.random.PRNGKey(1), None
        for _ in range(steps // 50):
            key, data_key, update_key = jax.random.split(key, 3)
            state, loss = update(state, sample(data_key, trajectories), update_key)
        return loss

    keys = jax.random.split(jax.random.PRNGKey(0), SEEDS)
    single, many = jax.jit(scan), jax.jit(jax.vmap(scan))
    state, states = start(keys[0]), jax.vmap(start)(keys)
    narrow, narrow_states = _in_bfloat16(state), _in_bfloat16(states)
    ways = {
        "JAX-CORL's loop": (loop, steps // 50),
        "JAX-CORL's step in one scan": (lambda: single(state, keys[0]), steps),
        f"the same, {SEEDS} seeds vmapped, in sum": (lambda: many(states, keys), SEEDS * steps),
        "one scan, bfloat16": (lambda: single(narrow, keys[0]), steps),
        f"{SEEDS} seeds, bfloat16, in sum": (lambda: many(narrow_states, keys), SEEDS * steps),
    }
    rates = {}
    for name, (call, count) in ways.items():
        if "bfloat16" in name:  # traced anew, since the types of the state differ
            on_device = _in_bfloat16(on_device)
        jax.block_until_ready(call())
        seconds = []
        for _ in range(turns):
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - began)
        rates[name] = count / float(np.median(seconds))
        print(f"{name}: {rates[name]:,.0f} steps/s", file=sys.stderr, flush=True)
    return rates


def _in_bfloat16(tree: Any) -> Any:
    import jax

    def cast(leaf: Any) -> Any:
        array = jax.numpy.asarray(leaf)
        floating = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
        return array.astype(jax.numpy.bfloat16) if floating else leaf

    return jax.tree.map(cast, tree)
