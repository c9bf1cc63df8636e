"""Training steps a second of JAX-CORL's Decision Transformer and of ours, on the same data.

``JAX_CORL`` names a checkout of https://github.com/nissymori/JAX-CORL; jax, flax, optax and
omegaconf must be there.  Three ways to run its own functions: its loop as it is (a Python loop of
two jitted calls, trajectories as NumPy arrays), trajectories on the device and the loop as one
``lax.scan``, and that for eight seeds under ``vmap``; the scans in both precisions, as ours.  Its
code has no option for bfloat16: all its weights, moments and data are cast.  Sizes are the paper's
(128 wide, 3 layers, windows of 20, batches of 64, dropout 0.1); its float32 products run in JAX's
default precision.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.common import Call, Data, alternate, hopper_like, keep_partial, need_cuda, timed
from benchmarks.train import paper_learner
from gear_offline.core.text import say
from gear_offline.errors import UnavailableError
from gear_offline.training.stack import make_step

SEEDS = 8
STEPS = 200  # of a scan
PYTHON_STEPS = 10  # of its own loop, which makes about 13 a second
PRECISIONS = ("bf16", "fp32")
NARROW = " with bfloat16 weights"
Way = tuple[str, str, int]  # its name, its precision, the steps that a call makes


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; five minutes or more, of which compiling takes most; PARTIAL keeps each round."""
    need_cuda()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU holds both
    peer = _peer()
    calls = dict[Way, Call]()
    with hopper_like(quick=quick) as data:
        makers = _ways(peer, *_trajectories(peer, data))
        with ThreadPoolExecutor() as pool:  # alone: XLA times kernels on the GPU to choose some
            for way, call in zip(makers, pool.map(_call, makers.values()), strict=True):
                calls[way] = call
                say(f"{way[0]}, {way[1]}: compiled")
        for precision in PRECISIONS:
            options = ("train.graph=on", "train.compile=on", f"train.precision={precision}")
            for name, seeds in (("one graph, compiled", 1), ("8 seeds stacked, in sum", SEEDS)):
                learners = [paper_learner(data.dataset, options, seed=n) for n in range(seeds)]
                calls[f"ours, {name}", precision, seeds] = step = make_step(learners).run
                timed(step, 2)
                say(f"ours, {name}, {precision}: compiled")
        seconds = alternate(
            calls, turns=3, seconds=0.5, after_turn=lambda m: keep_partial(_rows(m))
        )
    rows = _rows(seconds)
    return {"base": "ours, one graph, compiled, bf16", "results": rows}


def _call(make: Callable[[], Call]) -> Call:
    return make()


def _rows(seconds: Mapping[Way, float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "precision": precision, "steps_per_second": count / each}
        for (name, precision, count), each in seconds.items()
    ]


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
    # jnp.sqrt of its number of units is float32, which would make all that follows float32
    vars(numbers := ModuleType("jnp")).update(vars(module.jax.numpy), sqrt=math.sqrt)
    vars(module)["jnp"] = numbers
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


def _ways(peer: ModuleType, lengths: Any, trajectories: Any) -> dict[Way, Callable[[], Call]]:
    """Return what compiles each way to train it."""
    import jax

    config = peer.config
    options = (config.batch_size, config.context_len, len(lengths))
    sizes = jax.numpy.array(lengths)

    def scan(state: Any, key: Any, source: Any) -> Any:
        def step(carried: Any, _: None) -> Any:
            state, key = carried
            key, data_key, update_key = jax.random.split(key, 3)
            batch = peer.sample_traj_batch(data_key, source, *options, sizes)
            state, loss = peer.DT.update(state, batch, update_key)
            return (state, key), loss

        return jax.lax.scan(step, (state, key), None, STEPS)[1]

    def compiled(seeds: int, precision: str) -> Call:
        cast = _in_bfloat16 if precision == "bf16" else lambda tree: tree
        of_keys = (state, keys[0]) if seeds == 1 else (states, keys)
        called = scan if seeds == 1 else jax.vmap(scan, (0, 0, None))
        given = cast((*of_keys, jax.device_put(trajectories)))
        program = jax.jit(called).lower(*given).compile()
        return lambda: jax.block_until_ready(program(*given))

    def loop() -> Any:
        trained, key, loss = state, jax.random.PRNGKey(1), None
        for _ in range(PYTHON_STEPS):
            key, data_key, update_key = jax.random.split(key, 3)
            batch = peer.sample_traj_batch(data_key, trajectories, *options, sizes)
            trained, loss = update(trained, batch, update_key)
        return jax.block_until_ready(loss)

    keys = jax.random.split(jax.random.PRNGKey(0), SEEDS)
    states = jax.vmap(lambda key: peer.create_dt_train_state(key, 11, 3, config))(keys)
    state = jax.tree.map(lambda leaf: leaf[0], states)
    update = jax.jit(peer.DT.update)
    ways: dict[Way, Callable[[], Call]] = {}
    for precision in PRECISIONS:
        single = "JAX-CORL's step in one scan", precision, STEPS
        ways[single] = partial(compiled, 1, precision)
        name = f"the same{NARROW * (precision == 'bf16')}, 8 seeds vmapped, in sum"
        ways[name, precision, SEEDS * STEPS] = partial(compiled, SEEDS, precision)
    ways["JAX-CORL's loop", "fp32", PYTHON_STEPS] = lambda: loop
    return ways


def _in_bfloat16(tree: Any) -> Any:
    import jax

    def cast(leaf: Any) -> Any:
        array = jax.numpy.asarray(leaf)
        floating = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
        return array.astype(jax.numpy.bfloat16) if floating else leaf

    return jax.tree.map(cast, tree)
