"""What ends one run among others, in words; and what ends everything that a process does on a GPU.

After some errors of CUDA (an illegal address, a failed launch) each further call of the process
fails too.  Those leave `in_words` as they are, for who owns all the runs: see `gpu_lost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gear_offline.core.files import write_error
from gear_offline.errors import GearError, is_out_of_memory


@contextmanager
def in_words(name: str, path: Path, device: torch.device) -> Iterator[None]:
    """Turn what may end one run into its error.

    Parameters
    ----------
    name
        Of the run.
    path
        Its run directory.
    device
        Where it trains.

    Raises
    ------
    GearError
        ``MEMORY``, ``OUTPUT_WRITE``; ``RUN_FAILED`` for other errors of torch,
        its compiler or a kernel.  Errors that are none of these, and any after which the GPU does
        nothing more for this process, are not touched.
    """
    try:
        yield
    except GearError:
        raise
    except OSError as error:
        raise write_error(error, str(path)) from error
    except Exception as error:
        if not _is_of_torch(error) or is_gpu_lost(device):
            raise
        if any(is_out_of_memory(part) for part in _with_contexts(error)):
            raise GearError(
                "MEMORY",
                f"out of memory: {_first_line(error)}",
                where=name,
                remedy="fewer runs at a time (sweep --parallel), or a smaller model or batch",
            ) from error
        raise GearError(
            "RUN_FAILED",
            f"{type(error).__name__}: {_first_line(error)}",
            where=name,
            remedy="`gear-offline train RUN --resume --debug` repeats it alone and shows where",
        ) from error


def is_gpu_lost(device: torch.device) -> bool:
    """Return whether `device` does nothing more for this process; asked after an error."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # such errors come again with each call, others do not
    except RuntimeError:
        return True
    return False


def gpu_lost(error: Exception, where: str) -> GearError:
    """Return the error that ends all runs of a process whose GPU is lost."""
    return GearError(
        "GPU_LOST",
        f"the GPU does nothing more for this process after {type(error).__name__}: "
        f"{_first_line(error)}",
        where=where,
        remedy="the same command goes on from the newest checkpoints; with --mode processes it "
        "tells which run it was",
    )


def _is_of_torch(error: Exception) -> bool:
    """Return whether torch, a library below it, or the memory may have raised it."""
    kinds = (RuntimeError, MemoryError)
    return isinstance(error, kinds) or type(error).__module__.partition(".")[0] == "triton"


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that were being handled: a failed capture hides why it failed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
