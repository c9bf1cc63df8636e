"""The models in the box by their names, and how others are named; imports no torch."""

from __future__ import annotations

from gear_offline.config.sections import MODEL_KINDS
from gear_offline.core.parts import Kind

MODELS = Kind(
    noun="model",
    group="models",
    option="model.kind",
    argument="--model",
    code="MODEL",
    own={name: f"gear_offline.models.{place}" for name, (_, place) in MODEL_KINDS.items()},
)
