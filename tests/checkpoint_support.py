"""What tests of checkpoints share: how to write one without a run, and a learner without data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from gear_offline.artifacts.checkpoint import SavedState, write_checkpoint
from gear_offline.batches.tables.fields import Window
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.distributed.world import World
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.training.learner import Learner

RECIPE = load_recipe("smoke")


def saved_state(step: int) -> SavedState:
    window = Window(
        context_length=5,
        returns_scale=100.0,
        state_mean=(0.1, 1 / 3, -1e300),
        state_std=(1.0, 0.0, 5e-324),
    )
    loader = {"step": step, "seed": 0}
    state: dict[str, Any] = {"step": step, "loader": loader, "window": window, "groups": []}
    return SavedState(seconds=1.25, recipe=RECIPE.to_dict(), **state)


def training_tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "optimizer/exp_avg/w": torch.randn(4, generator=generator),
        "random/cpu": torch.arange(9, dtype=torch.uint8),
        "window": torch.zeros(0, 2),
    }


def save_checkpoint(
    folder: Path, model: DecisionTransformer, step: int, state: SavedState | None = None
) -> Path:
    """Write a checkpoint into the folder of a run's checkpoints."""
    state = saved_state(step) if state is None else state
    weights, partial = model.state_dict(), folder / f".partial-{step}"
    return write_checkpoint(partial, state, model.config_text(), weights, training_tensors(step))


class StandIn(SimpleNamespace):
    """A learner without data, as far as a `Saver` asks."""

    def __init__(self, model: DecisionTransformer, training: Mapping[str, Tensor]) -> None:
        window = Window(context_length=5, returns_scale=1.0)
        loader = SimpleNamespace(state_dict=lambda: {"step": self.step}, window=window)
        super().__init__(
            step=0,
            world=World(),
            recipe=RECIPE,
            model=model,
            device=next(model.parameters()).device,
            loader=loader,
            optimizer=SimpleNamespace(describe=list),
            parallel=SimpleNamespace(sharded=False),
            tensors=lambda: dict(training),
        )

    @property
    def learner(self) -> Learner:
        return cast(Learner, cast(Any, self))


RUN: dict[str, Any] = {
    "name": "tiny",
    "loader": {"context_length": 4, "returns_scale": 50.0},
    "model": {"hidden_size": 16, "layers": 2, "max_timestep": 300},
}
PLAY = {"targets": [-200.0, -900.0], "episodes": 2, "environments": 2, "seed": 3}


def write_run(
    folder: Path,
    *,
    steps: Sequence[int] = (10, 20),
    environment: str = "Pendulum-v1",
    options: dict[str, Any] | None = None,
) -> Path:
    """A run directory as training leaves it, with different weights at each checkpoint."""
    played = {"environment": environment, "environment_options": options}
    recipe = Recipe.parse(RUN | {"evaluate": PLAY | played})
    plain: Any = {"state_mean": (0.0,) * 3, "state_std": (1.0,) * 3}
    window = Window(context_length=4, returns_scale=50.0, **plain)
    for step in steps:
        torch.manual_seed(0)
        model = build_model(state_dim=3, action_dim=1, **RUN["model"])
        head = next(m for m in model.predict_action.modules() if isinstance(m, torch.nn.Linear))
        torch.nn.init.normal_(head.weight, std=0.1 * step)
        changes = {"recipe": recipe.to_dict(), "loader": {}, "window": window}
        state = saved_state(step).model_copy(update=changes)
        save_checkpoint(folder / "checkpoints", model, step, state)
    (folder / "checkpoints" / "best").symlink_to(f"step-{steps[0]:08d}")
    return folder
