"""Kill ranks of a sharded training while they save: ``python -m tests.trust.kill_shards``.

Two ranks train with FSDP2 and save shards after every step.  One of them is killed with SIGKILL in
a call that changes files, ``torchrun`` starts both again, and the last checkpoint must have the
bytes of one of a training that nobody disturbed.  Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from gear_offline.training.checkpoint_folder import list_checkpoints
from tests.ranks_support import launch

STEPS = 8
MOST_CALLS = 60  # a rank makes more than that, the second one a third of it


def train_as_rank(data: str, run: str, victim: str, call: str) -> None:
    """Train; the victim kills itself in its `call`-th call that changes files, the first time."""
    from gear_offline.runs.trainer import train
    from tests.training_support import kill_in_call, register_environment, tiny_recipe

    register_environment()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        Path(run).with_suffix(".again").touch()
    elif os.environ["RANK"] == victim:
        kill_in_call(int(call))
    recipe = tiny_recipe(
        *(Path(data), f"train.steps={STEPS}", "train.checkpoint_every=1", "train.parallel=fsdp"),
        *("train.device=cpu", "train.threads=1", "evaluate.episodes=0"),
    )
    train(recipe, out=Path(run), resume=True, quiet=True)


def trained(data: Path, run: Path, victim: int, call: int) -> dict[str, bytes]:
    """Run two ranks to the end; return the files of the last checkpoint but ``state.json``."""
    words = ("-m", "tests.trust.kill_shards", "--as-rank")
    arguments = (str(data), str(run), str(victim), str(call))
    launch(2, *words, *arguments, restarts=1, timeout=300)
    step, last = list_checkpoints(run / "checkpoints")[-1]
    assert step == STEPS, f"the run ended after step {step}"
    assert not list((run / "checkpoints").glob(".*")), "something half written stayed"
    return {path.name: path.read_bytes() for path in last.iterdir() if path.name != "state.json"}


def run(kills: int, *, seed: int = 5) -> dict[str, Any]:
    from tests.training_support import tiny_data

    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gear-shards-") as temporary:
        folder = Path(temporary)
        data = tiny_data(folder)
        whole = trained(data, folder / "whole", -1, 0)
        killed = different = 0
        for number in range(kills):
            path, victim = folder / f"run-{number}", number % 2
            call = generator.randint(1, MOST_CALLS if victim == 0 else MOST_CALLS // 3)
            different += trained(data, path, victim, call) != whole
            killed += path.with_suffix(".again").exists()
        return {
            "runs": kills,
            "killed": killed,
            "files_compared": sorted(whole),
            "different": different,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        train_as_rank(*arguments.as_rank)
        return 0
    document = run(arguments.kills)
    print(json.dumps(document, indent=1))
    return 1 if document["different"] or document["killed"] < document["runs"] // 2 else 0


if __name__ == "__main__":
    sys.exit(main())
