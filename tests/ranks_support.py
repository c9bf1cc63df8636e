"""Ranks of tests: torchrun on this machine, for modules and scripts of the checkout."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from gear_offline.config.recipe import load_recipe
from tests.forks import run_forked
from tests.support import ROOT, run_python

RECIPE = """
name: ranks
data: {path: %s}
model: {hidden_size: 16, layers: 1, dropout: 0.0, action_tanh: false}
loader: {batch_size: 12, context_length: 6}
optimizer: {warmup_steps: 3}
train: {steps: 20, log_every: 5, checkpoint_every: 10, device: cpu, threads: 1}
evaluate: {episodes: 0}
"""
DEEPER = ("model.layers=2", "model.heads=2", "train.log_every=2", "train.checkpoint_every=4")


def ranks_recipe(path: Path, data: Path, *changes: str) -> Path:
    """Write the recipe of a run of seconds, without dropout, to `path`."""
    path.write_text(RECIPE % data)
    path.write_text(load_recipe(path, changes).to_yaml())
    return path


def torchrun(ranks: int, *words: str) -> list[str]:
    """Return the command that starts so many ranks; `words` are its options and what to run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*command, *words]


def fork_ranks(
    ranks: int, *words: str | Path, variables: Mapping[str, str] = {}
) -> CompletedProcess[str]:
    """Run so many ranks of this machine to their end, in forks: quicker than torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return run_forked(*words, count=ranks, variables={**group, **variables})


def environment() -> dict[str, str]:
    """Return the variables of ranks: one thread each, and the modules of the checkout first."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def launch(
    ranks: int, *words: str, restarts: int = 0, timeout: float = 180.0,
    variables: Mapping[str, str] = {},
) -> CompletedProcess[str]:  # fmt: skip
    """Run so many ranks of this machine to their end, which must be good; `variables` are added."""
    _, *command = torchrun(ranks, "--standalone", "--max-restarts", str(restarts), *words)
    variables = {"OMP_NUM_THREADS": "1", **variables}
    done = run_python(*command, variables=variables, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done
