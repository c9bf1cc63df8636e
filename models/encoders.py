"""Encoders that turn a step's frames into a vector, for the Decision Transformer's state token.

Shape legend: B windows, K steps, S frames of a stack, h x w pixels, C colours, N = B * K stacks,
H features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.dataset.schema import channels_last
from gear_offline.errors import InputError
from gear_offline.models.narrow import compute_dtype

Encoder = Literal["auto", "none", "cnn", "patch"]
PIXEL_SCALE = 1.0 / 255.0
# channels, kernel, stride: Mnih et al. 2015, and the Decision Transformer paper's Atari model
NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
NATURE_SIDE = 36  # the smallest frame that they leave a position of
PATCH_CHANNELS = 128
LARGEST_PATCH = 16
Size = Annotated[int, Field(ge=1, le=1 << 31)]
COLUMN_KEYS = ("observations", "frame_shape", "frame_dtype", "frame_stack")  # of configurations


class InputColumn(BaseModel):
    """A column of observations as a model takes it; part of the model's configuration."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    name: str
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=8, strict=False)]  # of a step
    frames: Literal["uint8", "float32"] | None = None  # their type; None: a vector
    stack: Annotated[int, Field(ge=1, le=64)] = 1  # frames that make up a state
    encoder: Literal["none", "cnn", "patch"] = "none"

    @property
    def size(self) -> int:
        """Numbers in an observation."""
        return prod(self.shape)

    @property
    def text(self) -> str:
        """Name and size: ``camera, 2 frames of 84 x 84``."""
        text = count_text(self.size, "observation value")
        if self.frames:
            text = f"{count_text(self.stack, 'frame')} of {' x '.join(map(str, self.shape))}"
        return f"{self.name}: {text}" if self.name else text

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a state: of frames a stack of them."""
        return (self.stack, *self.shape) if self.frames else self.shape

    def rows(self, values: Any, count: int) -> Array:
        """Return `count` observations (n, *shape) of an environment, as the data hold them.

        Others are ``MODEL``.  Colours of frames may come first or last.
        """
        rows, where = np.asarray(values), self.name and f"observations[{self.name!r}]"
        if rows.size != count * self.size:
            problem = f"observations of shape {rows.shape} are not those of "
            problem += count_text(count, "environment")
            remedy = f"give each that acts {self.size} elements: act(observation[None])"
            raise InputError("MODEL", problem, where, remedy)
        if self.frames and rows.dtype.kind != ("u" if self.frames == "uint8" else "f"):
            problem = f"frames are {rows.dtype}, the model expects {self.frames}"
            raise InputError("MODEL", problem, where)
        if self.frames and rows.shape[1:] != self.shape and rows.ndim == 4:
            first, last = channels_last(rows.shape[1:]), channels_last(self.shape)
            if first == last:
                rows = np.moveaxis(rows, 1, -1) if self.shape == last else np.moveaxis(rows, -1, 1)
        return np.ascontiguousarray(rows).reshape(count, *self.shape)

    def features(self, hidden_size: int) -> int:
        """Return the number of elements that it becomes in the model's state."""
        return self.stack * self.size if self.encoder == "none" else hidden_size


def column_facts(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the columns of a configuration: all, or a single one by its ``frame_shape``, if any.

    A ``frame_stack`` is of all that hold frames.
    """
    shape, stack = config.get("frame_shape"), config.get("frame_stack")
    single = {"name": "", "shape": shape or (config.get("state_dim"),)}
    if shape:
        single["frames"] = config.get("frame_dtype", "uint8")
        single["encoder"] = config.get("frame_encoder", "none")
    several = config.get("columns") or config.get("observations") or [single]
    columns = [dict(column) for column in several]
    for column in columns:
        if column.get("frames") and stack is not None:
            column["stack"] = stack
    return columns


class ColumnEncoder(nn.Module):
    """Concatenate the encoded columns.

    Frames come from an encoder each.  A linear map of what stands side by side is the sum of a
    linear map of each.  So a vector needs no encoder, and the state token is the columns' sum.
    """

    def __init__(self, columns: Sequence[InputColumn], *, features: int) -> None:
        super().__init__()
        self.columns = tuple(columns)
        self.encoders = nn.ModuleList(
            nn.Identity()
            if column.encoder == "none"
            else FrameEncoder(
                column.encoder,
                frame_shape=column.shape,
                frame_stack=column.stack,
                features=features,
            )
            for column in self.columns
        )

    def forward(self, states: Mapping[str, Tensor]) -> Tensor:
        """Encode (B, K, *shape) of each column, or (B, K, stack, *frame): (B, K, S) floating."""
        pairs = zip(self.columns, self.encoders, strict=True)
        features = [encoder(states[column.name]).flatten(2) for column, encoder in pairs]
        return torch.cat(features, dim=2)  # of the widest type


class FrameEncoder(nn.Module):
    """Frames of each step to H features: convolutions, linear layers, tanh.

    ``cnn``: the three convolutions of the DQN, which the Decision Transformer paper uses for
    Atari.  ``patch``: one linear map of each square patch and one of its features, with patches of
    the largest size up to 16 that divides the frame.  Frames, (h, w), (h, w, C) or (C, h, w), that
    it cannot take are `InputError` (``MODEL``).

    Pixels of uint8 count as ``pixel / 255``; the factor is applied to the first layer's
    weights, which are few.  Floating pixels count as they are.  The frames of a stack are the
    input channels, so that neighbouring steps share no work: each of the B * K stacks is encoded
    once.
    """

    def __init__(
        self, encoder: str, *, frame_shape: Sequence[int], frame_stack: int, features: int
    ) -> None:
        super().__init__()
        if encoder not in ("cnn", "patch"):
            raise InputError("MODEL", f"no encoder {encoder!r}", where="model.encoder")
        height, width, *colours = channels_last(tuple(frame_shape))
        make = _nature if encoder == "cnn" else _patches
        convolutions, positions = make(frame_stack * prod(colours), height, width)
        self.convolutions = nn.ModuleList(convolutions)
        channels = convolutions[-1].out_channels
        self.mixer: nn.Linear | None = None
        if encoder == "patch":  # a further layer at each position
            self.mixer, channels = nn.Linear(channels, channels // 2), channels // 2
        self.linear = nn.Linear(channels * positions, features)
        self.frame_shape = tuple(frame_shape)

    def forward(self, frames: Tensor) -> Tensor:
        """Encode frames, (B, K, *frame) or (B, K, S, *frame): (B, K, H) in (-1, 1)."""
        if frames.dim() == 2 + len(self.frame_shape):
            frames = frames.unsqueeze(2)
        if len(self.frame_shape) == 2:
            frames = frames.unsqueeze(-1)
        elif channels_last(self.frame_shape) != self.frame_shape:
            frames = frames.movedim(3, -1)
        batch, steps, _, height, width, _ = frames.shape
        floating = frames.is_floating_point()
        first, *layers = cast(list[nn.Conv2d], list(self.convolutions))
        # One pass over the pixels casts them to what convolutions compute in, exactly, takes
        # stacks apart and lays channels last.
        pixels = frames.permute(0, 1, 3, 4, 2, 5)  # (B, K, h, w, S, C)
        dtype = compute_dtype(self.linear.weight)
        pixels = pixels.to(dtype, memory_format=torch.contiguous_format)
        hidden = pixels.reshape(batch * steps, height, width, -1).permute(0, 3, 1, 2)
        weight = first.weight if floating else first.weight * PIXEL_SCALE
        hidden = F.relu(F.conv2d(hidden, weight, first.bias, first.stride))
        for layer in layers:
            hidden = F.relu(layer(hidden))
        # Channels are the last in memory, so that flattening in that order moves nothing.
        hidden = hidden.permute(0, 2, 3, 1)  # (N, h', w', channels)
        if self.mixer is not None:
            hidden = F.relu(self.mixer(hidden))
        features = torch.tanh(self.linear(hidden.flatten(1)))
        return features.view(batch, steps, -1)


def resolve_encoder(encoder: str, frame_shape: Sequence[int]) -> str:
    """Resolve the encoder's name: ``auto`` is ``cnn`` for frames and else ``none``."""
    if encoder == "auto":
        return "cnn" if frame_shape else "none"
    if encoder != "none" and not frame_shape:
        problem = f"the {encoder} encoder needs frames, the states are vectors"
        raise InputError("MODEL", problem, "model.encoder", "use model.encoder=auto")
    return encoder


def _nature(channels: int, height: int, width: int) -> tuple[list[nn.Conv2d], int]:
    """Return layers and the positions of a frame that they leave."""
    layers, sizes = [], [height, width]
    for out, kernel, stride in NATURE_LAYERS:
        layers.append(nn.Conv2d(channels, out, kernel, stride))
        channels, sizes = out, [(size - kernel) // stride + 1 for size in sizes]
    if min(sizes) < 1:
        problem = f"frames of {height} x {width} pixels are too small for the cnn encoder"
        encoder = "patch" if _patch_size(height, width) else "none"
        raise InputError("MODEL", problem, "model.encoder", f"use model.encoder={encoder}")
    return layers, prod(sizes)


def _patches(channels: int, height: int, width: int) -> tuple[list[nn.Conv2d], int]:
    size = _patch_size(height, width)
    if not size:
        problem = f"frames of {height} x {width} pixels have no patches of up to {LARGEST_PATCH} "
        encoder = "cnn" if min(height, width) >= NATURE_SIDE else "none"
        raise InputError(
            "MODEL", problem + "pixels", "model.encoder", f"use model.encoder={encoder}"
        )
    layer = nn.Conv2d(channels, PATCH_CHANNELS, size, size)
    return [layer], (height // size) * (width // size)


def _patch_size(height: int, width: int) -> int:
    """Return the largest side of patches that divides a frame, 0 if none does."""
    sides = range(LARGEST_PATCH, 1, -1)
    return next((side for side in sides if height % side == 0 and width % side == 0), 0)
