"""Small models, the released class with their weights, and batches, for the tests of the model."""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.loss import mean_loss, step_losses

TOLERANCE = 1e-5  # float32, on valid tokens
STATES, ACTIONS, STEPS, WINDOWS = 5, 3, 7, 6


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def meta() -> torch.device:
    """Return another default device than the CPU, a context."""
    return torch.device("meta")


def make(**changes: Any) -> DecisionTransformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"state_dim": STATES, "action_dim": ACTIONS, "hidden_size": 16}
    sizes |= {"layers": 2, "heads": 2, "max_timestep": 50, "context_length": STEPS}
    return build_model(**(sizes | changes))


def assert_same_state(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Compare names and weights, bit for bit."""
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


def load_completely(kind: Any, path: Path) -> Any:
    """Load the released class from files that lack nothing and hold nothing else."""
    model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info[which] for which in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def inputs(steps: int = STEPS, *, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(WINDOWS, steps, *shape, generator=generator)

    return {
        "states": normal(STATES),
        "actions": normal(ACTIONS).tanh(),
        "rewards": normal(1),
        "returns_to_go": normal(1),
        "timesteps": torch.randint(0, 50, (WINDOWS, steps), generator=generator),
        "attention_mask": torch.ones((WINDOWS, steps), dtype=torch.long),
    }


def mask(kind: str, steps: int = STEPS) -> Tensor:
    """(WINDOWS, steps) int64 with 1 + i real steps in window i, where `kind` says."""
    lengths = torch.arange(WINDOWS).remainder(steps)[:, None] + 1
    places = torch.arange(steps)
    if kind == "right":
        found = places < lengths
    elif kind == "left":
        found = places >= steps - lengths
    elif kind == "holes":
        found = (places * 5 + torch.arange(WINDOWS)[:, None]) % 3 != 0
    else:
        found = torch.ones((WINDOWS, steps), dtype=torch.bool)
    return found.long()


def action_loss(predictions: Tensor, actions: Tensor, attention_mask: Tensor | None) -> Tensor:
    return mean_loss(step_losses(predictions, actions), attention_mask)


def largest_difference(ours: Tensor, theirs: Tensor, valid: Tensor | EllipsisType = ...) -> float:
    return float((ours - theirs).detach()[valid].abs().max())
