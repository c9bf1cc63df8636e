"""Ranks of tests: torchrun on this machine, for modules and scripts of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT


def torchrun(ranks: int, *words: str) -> list[str]:
    """Return the command that starts so many ranks; `words` are its options and what to run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*command, *words]


def environment() -> dict[str, str]:
    """Return the variables of ranks: one thread each, and the modules of the checkout first."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def launch(
    ranks: int, *words: str, restarts: int = 0, timeout: float = 180.0
) -> subprocess.CompletedProcess[str]:
    """Run so many ranks of this machine to their end, which must be a good one."""
    done = subprocess.run(
        torchrun(ranks, "--standalone", "--max-restarts", str(restarts), *words),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
