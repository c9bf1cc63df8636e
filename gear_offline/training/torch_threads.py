"""Torch's CPU threads: sums over several threads have other last bits than sums over one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` CPU threads while inside; ``None`` changes nothing.

    The caller's number is there again afterwards, whatever was set inside.
    """
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
