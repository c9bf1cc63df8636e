"""A loader in the worker processes of a PyTorch ``DataLoader``.

Every worker has a copy of the loader.  Left alone, each would give the same batches; so worker `w`
of `n` gives every `n`-th batch from the `w`-th on, and the ``DataLoader``, which takes from its
workers in turn, hands out the batches of the loader in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader


def worker_batches(loader: GearLoader) -> Iterator[Batch] | None:
    """Return this worker's batches from the loader's position on; ``None`` in no worker.

    Raises
    ------
    InputError
        ``LOADER_OPTION`` for a loader that only the process that made it can use.
    """
    info = get_worker_info()
    if info is None:
        return None
    _refuse(
        {
            "a strategy that learns from losses": loader.learner is not None,
            **_bound(loader),
            f"device {loader.device}": loader.device.type != "cpu",
        },
        "is not usable in worker processes of a DataLoader",
        "use num_workers=0, or the loader itself: it needs no DataLoader",
    )
    return _every(loader, info.id, info.num_workers)


def _every(loader: GearLoader, first: int, stride: int) -> Iterator[Batch]:
    step = loader.step + first
    while True:
        yield loader.batch_at(step)
        step += stride


def sendable(loader: GearLoader) -> dict[str, Any]:
    """Return what another process gets of a loader: without the batches that are made already.

    They are views of one block, and pickle would copy the whole block for each.

    Raises
    ------
    InputError
        ``LOADER_OPTION`` for a loader that only the process that made it can use.
    """
    _refuse(
        _bound(loader) | {"a GPU engine": loader.engine is not None},
        "cannot be copied into another process",
        "make it there: its batches follow from dataset, options and step",
    )
    return loader.__dict__ | {"_ready": []}


def _bound(loader: GearLoader) -> dict[str, bool]:
    """Return what of a loader is bound to its process, and whether it has that."""
    return {
        "rows on disk": loader.disk is not None,
        "a dataset spread over nodes": loader.spread is not None,
    }


def _refuse(bound: dict[str, bool], why: str, remedy: str) -> None:
    for what, found in bound.items():
        if found:
            raise InputError("LOADER_OPTION", f"a loader with {what} {why}", remedy=remedy)
