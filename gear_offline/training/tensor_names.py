"""Names of tensors of several kinds in one mapping: a prefix says which kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
MODEL, TRAINING = "model/", "training/"  # the parameters, and what else a checkpoint holds


def named(kind: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return `tensors` with `kind` before their names."""
    return {kind + name: tensor for name, tensor in tensors.items()}


def part(tensors: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return those of one kind, by their own names."""
    return {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
