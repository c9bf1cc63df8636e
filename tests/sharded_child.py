"""One rank of a sharded run in tests: trains, and compares the acting copy with the checkpoint."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from gear_offline.checkpoint_folder import list_checkpoints
from gear_offline.learner import Learner
from gear_offline.recipe import load_recipe
from gear_offline.trainer import train


def main(recipe: str, out: str, *options: str) -> None:
    made: list[Learner] = []
    close = Learner.close

    def remember(self: Learner) -> None:
        made.append(self)
        self.prepare_policy()
        close(self)

    Learner.close = remember  # type: ignore[method-assign]
    train(load_recipe(recipe, options), out=Path(out), resume=True)
    (learner,) = made
    assert learner.parallel.sharded
    if learner.world.is_first:
        saved = load_file(list_checkpoints(Path(out) / "checkpoints")[-1][1] / "model.safetensors")
        acting = learner.policy().model.state_dict()
        assert acting.keys() == saved.keys()
        assert all(torch.equal(acting[name].cpu(), tensor) for name, tensor in saved.items())
        print("acts like the whole model")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # shows where a rank hangs
    main(*sys.argv[1:])
