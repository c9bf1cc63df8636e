"""What it takes to act: the one place where a policy is built from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.types import Float64Array

if TYPE_CHECKING:
    from gear_offline.models.decision_transformer import DecisionTransformer
    from gear_offline.models.policy import Policy


class PolicyParts(NamedTuple):
    """What it takes to act: the model and how its inputs were scaled.

    The statistics are (S,) float64, or None when the states were not normalised.
    """

    model: DecisionTransformer
    """Where it was made: on the CPU if it comes from a checkpoint."""
    state_mean: Float64Array | None
    """(S,) of the training data."""
    state_std: Float64Array | None
    """(S,); the model saw ``(state - mean) / (std + 1e-6)``."""
    returns_scale: float
    """Returns-to-go were divided by it."""
    context_length: int
    """K, steps of the training windows."""
    recipe: Recipe
    """Of the run."""

    def policy(self, device: torch.device | str = "cpu") -> Policy:
        """Return what acts, on `device`; the model is moved there, into evaluation mode."""
        from gear_offline.models.policy import Policy

        return Policy(
            self.model,
            state_mean=self.state_mean,
            state_std=self.state_std,
            returns_scale=self.returns_scale,
            context_length=self.context_length,
            device=device,
        )
