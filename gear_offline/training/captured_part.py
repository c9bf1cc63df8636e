"""What every captured step is made of: capturing, warming up, and one run's part of a step.

Shape legend: n rows of the window of losses and gradient norms.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.training.optimizer import Optimizer

if TYPE_CHECKING:
    from gear_offline.kernels.adamw import Update
    from gear_offline.loaders.static_batch import StaticBatch

WARM_UPS = 3  # steps before capturing: libraries choose their algorithms and allocate
TIMED_FILLS = 50
# Other threads may ask for events meanwhile: NCCL's watchdog does all the time.
CAPTURE_MODE = "thread_local"


def _own_stream() -> Any:
    """Return the stream to capture on: torch's current one, unless that is the default one.

    The default one cannot be captured: None for the stream that torch keeps for captures, or a new
    one where that is another GPU's.
    """
    current: Any = torch.cuda.current_stream()
    if current != torch.cuda.default_stream():
        return current
    kept: Any = torch.cuda.graph.default_capture_stream
    if kept is None or kept.device == current.device:
        return None
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def capture(graph: Any, run: Callable[[], None]) -> None:
    """Capture what `run` launches."""
    # The first call of an operator leaves its part of the autograd graph in a cycle, and with
    # it gradients that belong to the stream of the warm-up.
    gc.collect()
    with torch.cuda.graph(graph, stream=_own_stream(), capture_error_mode=CAPTURE_MODE):
        run()


def warm_up(run: Callable[[], None], written: Iterable[Tensor], device: torch.device) -> None:
    """Run some steps on another stream, as capturing asks for, and undo what they did.

    Parameters
    ----------
    run
        Launches a step.
    written
        What steps write; put back afterwards, as the random numbers are.
    """
    # Detached: a copy that knew its parameter would keep the node that sums up the parameter's
    # gradient, made on this stream, and the warm-up would use that.
    saved = [(tensor, tensor.detach().clone()) for tensor in written]
    random: Any = torch.cuda.get_rng_state(device)
    cpu_random = torch.get_rng_state()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for tensor, before in saved:
            tensor.copy_(before)
    torch.cuda.set_rng_state(random, device)
    torch.set_rng_state(cpu_random)


def time_fill(batches: StaticBatch, step: int) -> float:
    """Return the GPU seconds of making one batch with nothing beside it."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    graph = torch.cuda.CUDAGraph()
    batches.enqueue()
    with torch.cuda.graph(graph, stream=_own_stream(), capture_error_mode=CAPTURE_MODE):
        for _ in range(TIMED_FILLS):
            batches.enqueue()
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    batches.set_step(step)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / TIMED_FILLS


class CapturedPart:
    """One run's part of a captured step: its batch, its update, its loss and norm.

    Parameters
    ----------
    optimizer
        Made with ``captured=True``.
    batches
        Made for the step to come.
    window
        (n, 2) float32 on the device: loss and gradient norm of each step since the last report.
    step
        The step to come.
    filled
        Rows of the window that are in use.

    Attributes
    ----------
    fill_seconds
        GPU seconds of making one batch with nothing beside it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: StaticBatch,
        window: Tensor,
        *,
        step: int,
        filled: int,
    ) -> None:
        self._optimizer, self._batches, self._window = optimizer, batches, window
        self._row = torch.full((1,), filled, dtype=torch.int64, device=window.device)
        self._index = torch.full((1,), step, dtype=torch.int64, device=window.device)
        self._start = step, filled
        self.fill_seconds = time_fill(batches, step)

    def rows(self, filled: int) -> Tensor:
        """Return the window's first rows, (filled, 2)."""
        return self._window[:filled]

    def wait_seconds(self) -> float:
        """Return the GPU seconds that a step waits for its batch; the last one must be done.

        Of a batch that is fetched a step ahead, what the last step was not in time with.
        """
        return self._batches.waited_seconds() if self._batches.ahead else self.fill_seconds

    def begin_window(self) -> None:
        """Write the next step's loss and norm to row 0 again."""
        self._row.zero_()

    def close(self) -> None:
        """Give back what only the capture needs."""

    @property
    def batches(self) -> StaticBatch:
        """Where a step's batch is."""
        return self._batches

    @property
    def index(self) -> Tensor:
        """The step to come, (1,) int64 on the device."""
        return self._index

    def finish(self, loss: Tensor) -> None:
        """Clip and update by the gradients, note loss and norm, and count."""
        self._optimizer.finish_on_device(
            loss, index=self._index, row=self._row, window=self._window
        )

    def update(self, loss: Tensor) -> Update:
        """Return what `finish` would do, to be done together with others."""
        return self._optimizer.update_on_device(
            loss, index=self._index, row=self._row, window=self._window
        )

    def finish_capture(self) -> None:
        """Make what was captured ready to be replayed from the start."""
        self._optimizer.finish_capture()
        self.put_back()

    def written(self) -> Iterator[Tensor]:
        """Yield what steps write and `put_back` does not reset."""
        yield from self._optimizer.weights
        yield from self._optimizer.state().values()
        yield self._window

    def repeat(self) -> None:
        """Make the step to come the first one again, without its batch: to warm up."""
        self._row.fill_(0)
        self._index.fill_(self._start[0])

    def put_back(self) -> None:
        """Make the step to come the first one again."""
        step, filled = self._start
        self._row.fill_(filled)
        self._index.fill_(step)
        self._batches.set_step(step)
