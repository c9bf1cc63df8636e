"""Encoders that turn a step's frames into a vector, for the Decision Transformer's state token.

Shape legend: B windows, K steps, S frames of a stack, h x w pixels, C colours, N = B * K stacks,
H features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.errors import InputError
from gear_offline.models.narrow import compute_dtype

Encoder = Literal["auto", "none", "cnn", "patch"]
PIXEL_SCALE = 1.0 / 255.0
# channels, kernel, stride: Mnih et al. 2015, and the Decision Transformer paper's Atari model
NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
NATURE_SIDE = 36  # the smallest frame that they leave a position of
PATCH_CHANNELS = 128
LARGEST_PATCH = 16


class FrameEncoder(nn.Module):
    """Frames of each step to H features: convolutions, linear layers, tanh.

    ``cnn``: the three convolutions of the DQN, which the Decision Transformer paper uses for
    Atari.  ``patch``: one linear map of each square patch and one of its features, with patches of
    the largest size up to 16 that divides the frame.  Another `kind`, or frames, (h, w) or
    (h, w, C), that it cannot take, is `InputError` (``MODEL``).

    Pixels are uint8 and count as ``pixel / 255``; the factor is applied to the first layer's
    weights, which are few.  The frames of a stack are the input channels, so that neighbouring
    steps share no work: each of the B * K stacks is encoded once.
    """

    def __init__(
        self, kind: str, *, frame_shape: Sequence[int], frame_stack: int, features: int
    ) -> None:
        super().__init__()
        if kind not in ("cnn", "patch"):
            raise InputError("MODEL", f"no encoder {kind!r}", where="model.encoder")
        height, width, *colours = frame_shape
        make = _nature if kind == "cnn" else _patches
        convolutions, positions = make(frame_stack * prod(colours), height, width)
        self.convolutions = nn.ModuleList(convolutions)
        channels = convolutions[-1].out_channels
        self.mixer: nn.Linear | None = None
        if kind == "patch":  # a further layer at each position
            self.mixer, channels = nn.Linear(channels, channels // 2), channels // 2
        self.linear = nn.Linear(channels * positions, features)
        self.frame_shape = tuple(frame_shape)

    def forward(self, frames: Tensor) -> Tensor:
        """Encode uint8 frames, (B, K, *frame) or (B, K, S, *frame): (B, K, H) in (-1, 1)."""
        if frames.dim() == 2 + len(self.frame_shape):
            frames = frames.unsqueeze(2)
        if len(self.frame_shape) == 2:
            frames = frames.unsqueeze(-1)
        batch, steps, _, height, width, _ = frames.shape
        first, *rest = cast(list[nn.Conv2d], list(self.convolutions))
        # One pass over the pixels casts them to what convolutions compute in, exactly, takes
        # stacks apart and lays channels last.
        pixels = frames.permute(0, 1, 3, 4, 2, 5)  # (B, K, h, w, S, C)
        kind = compute_dtype(self.linear.weight)
        pixels = pixels.to(kind, memory_format=torch.contiguous_format)
        hidden = pixels.reshape(batch * steps, height, width, -1).permute(0, 3, 1, 2)
        weight = first.weight * PIXEL_SCALE
        hidden = F.relu(F.conv2d(hidden, weight, first.bias, first.stride))
        for layer in rest:
            hidden = F.relu(layer(hidden))
        # Channels are the last in memory, so that flattening in that order moves nothing.
        hidden = hidden.permute(0, 2, 3, 1)  # (N, h', w', channels)
        if self.mixer is not None:
            hidden = F.relu(self.mixer(hidden))
        features = torch.tanh(self.linear(hidden.flatten(1)))
        return features.view(batch, steps, -1)


def resolve_encoder(encoder: str, frame_shape: Sequence[int]) -> str:
    """Return the encoder asked for; ``auto`` is ``cnn`` for frames and else ``none``."""
    if encoder == "auto":
        return "cnn" if frame_shape else "none"
    if encoder != "none" and not frame_shape:
        what = f"the {encoder} encoder needs frames, the states are vectors"
        raise InputError("MODEL", what, "model.encoder", "use model.encoder=auto")
    return encoder


def _nature(channels: int, height: int, width: int) -> tuple[list[nn.Conv2d], int]:
    """Return layers and the positions of a frame that they leave."""
    layers, sizes = [], [height, width]
    for out, kernel, stride in NATURE_LAYERS:
        layers.append(nn.Conv2d(channels, out, kernel, stride))
        channels, sizes = out, [(size - kernel) // stride + 1 for size in sizes]
    if min(sizes) < 1:
        what = f"frames of {height} x {width} pixels are too small for the cnn encoder"
        other = "patch" if _patch_size(height, width) else "none"
        raise InputError("MODEL", what, "model.encoder", f"use model.encoder={other}")
    return layers, prod(sizes)


def _patches(channels: int, height: int, width: int) -> tuple[list[nn.Conv2d], int]:
    size = _patch_size(height, width)
    if not size:
        what = f"frames of {height} x {width} pixels have no patches of up to {LARGEST_PATCH} "
        other = "cnn" if min(height, width) >= NATURE_SIDE else "none"
        raise InputError("MODEL", what + "pixels", "model.encoder", f"use model.encoder={other}")
    layer = nn.Conv2d(channels, PATCH_CHANNELS, size, size)
    return [layer], (height // size) * (width // size)


def _patch_size(height: int, width: int) -> int:
    """Return the largest side of patches that divides a frame, 0 if none does."""
    sides = range(LARGEST_PATCH, 1, -1)
    return next((side for side in sides if height % side == 0 and width % side == 0), 0)
