"""Torch's settings of a process while this package works; the caller's are set again behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from gear_offline.errors import InputError

_threaded = set[int]()  # this process and those it was forked from, if several threads computed


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Let new tensors be float32 and on the CPU where nothing else is said, only inside.

    They may be written in every thread: those of ``torch.inference_mode()`` only where that is on.
    """
    if torch.get_num_threads() > 1:
        _threaded.add(os.getpid())
    dtype, on_cpu = torch.get_default_dtype(), torch.get_default_device().type == "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if on_cpu else torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` CPU threads (None: no change), its defaults and gradients inside."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InputError("USAGE", "torch.autocast is on", remedy="leave it before this call")
    before = torch.get_num_threads()
    if (count or before) > 1 and _threaded - {os.getpid()}:
        problem = f"{count or before} threads of torch in a process forked from one with several "
        remedy = "start the process by multiprocessing.get_context('spawn')"
        raise InputError("USAGE", f"{problem}would wait for ever", remedy=remedy)
    torch.set_num_threads(count or before)
    try:
        with torch_defaults(), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


# OpenMP's other threads are not in a forked process, which would wait for them
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1) if _threaded else None)
