"""A whole training step as one CUDA graph: select, gather, forward, backward, clip, AdamW.

The host launches one graph a step and computes nothing: the step number, the learning rate and
the row of the metrics are read and advanced on the GPU.

Shape legend: n rows of the window of losses and gradient norms.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.data_parallel import GradientPass
from gear_offline.errors import UnavailableError
from gear_offline.graph_watch import wait_for_steps
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.optimizer import Optimizer
from gear_offline.parallel import Parallel
from gear_offline.rank_gradients import RankGradients
from gear_offline.recipe import Recipe
from gear_offline.world import World

if TYPE_CHECKING:
    from gear_offline.loaders.device_batches import DeviceBatches
    from gear_offline.loaders.device_feedback import DeviceFeedback
    from gear_offline.loaders.loader import GearLoader

WARM_UPS = 3  # steps before capturing: libraries choose their algorithms and allocate
TIMED_FILLS = 50
# Other threads may ask for events meanwhile: NCCL's watchdog does all the time.
CAPTURE_MODE = "thread_local"


def start_compilers() -> None:
    """Start the processes that compile kernels, so that they are there when tracing is done.

    They take some seconds to start, and torch would begin only then.
    """
    with contextlib.suppress(ImportError, AttributeError):  # not a promised part of torch
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


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


def why_not_captured(
    recipe: Recipe, device: torch.device, world: World, loader: GearLoader, *, sharded: bool
) -> str:
    """Return why steps are not captured as a CUDA graph, or nothing if they are.

    Raises
    ------
    UnavailableError
        ``GRAPH_UNAVAILABLE`` if the recipe insists.
    """
    train = recipe.train
    if train.graph == "off":
        return "train.graph=off"
    reason = ""
    if device.type != "cuda":
        reason = "CUDA graphs need a GPU"
    elif world.size > 1 and train.graph == "auto":
        reason = "several processes exchange gradients while they compute them"
    elif world.size > 1 and (sharded or train.weights == "bf16"):
        reason = "graphs of several ranks need replicas and float32 gradients"
    elif world.size > 1 and loader.learner is not None:
        reason = "the ranks tell each other the losses of segments"
    elif loader.spread:
        reason = "rows of other nodes come through the exchange"
    elif train.accumulate > 1:
        reason = "a batch is computed in micro-batches (train.accumulate)"
    elif train.recompute:
        reason = "blocks are computed twice (train.recompute)"
    elif loader.engine is None:
        reason = "batches are not made by the GPU (loader.engine)"
    if reason and train.graph == "on":
        raise UnavailableError(
            "GRAPH_UNAVAILABLE",
            f"train.graph=on is not possible: {reason}",
            remedy="use train.graph=auto, or see gear-offline doctor",
        )
    return reason


class CapturedStep:
    """One optimiser step, captured once and replayed.

    Building it runs `WARM_UPS` steps; weights, moments, random numbers and the batches' position
    are put back afterwards, so that nothing of them stays.  It is captured on torch's current
    stream if that is not the default one: graphs that run at once must not share a stream's
    workspace of cuBLAS.

    Parameters
    ----------
    model
        In training mode, on the batches' device.
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
    precision
        Autocast type, ``None`` for float32.
    compiled
        Compile forward and loss.
    feedback
        Of those batches, for selections that learn from losses.
    world
        The ranks that train together; all build theirs and replay it together.

    Attributes
    ----------
    fill_seconds
        GPU seconds of making one batch with nothing beside it.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        optimizer: Optimizer,
        batches: DeviceBatches,
        window: Tensor,
        *,
        step: int,
        filled: int,
        precision: torch.dtype | None,
        compiled: bool,
        feedback: DeviceFeedback | None = None,
        world: World | None = None,
    ) -> None:
        self._optimizer, self._batches, self._window = optimizer, batches, window
        self._row = torch.full((1,), filled, dtype=torch.int64, device=window.device)
        self._index = torch.full((1,), step, dtype=torch.int64, device=window.device)
        self._gradients = GradientPass(
            model,
            World(),
            parallel=Parallel("alone"),
            compiled=compiled,
            feedback=feedback,
            precision=precision,
        )
        self._ranks: RankGradients | None = None
        self._world = World() if world is None else world
        self._divisor: float | None = None
        if world is not None and world.size > 1:
            self._divisor = float(batches.batch.attention_mask.numel())
            self._ranks = RankGradients(optimizer.parameters, divisor=self._divisor)
        self._graph = torch.cuda.CUDAGraph()
        self.fill_seconds = self._time_fill(step)
        with contextlib.nullcontext() if feedback is None else feedback.paused():
            self._warm_up(step, filled)
        optimizer.zero_gradients()
        if self._ranks is not None and world is not None:
            torch.cuda.synchronize()
            world.gather(None)  # nobody captures while others still connect
        # The first call of an operator leaves its part of the autograd graph in a cycle, and with
        # it gradients that belong to the stream of the warm-up.
        gc.collect()
        with torch.cuda.graph(self._graph, stream=_own_stream(), capture_error_mode=CAPTURE_MODE):
            self._run()
        optimizer.finish_capture()
        self._put_back(step, filled)

    def replay(self) -> None:
        """Do the next step; returns at once."""
        self._graph.replay()

    def rows(self, filled: int) -> Tensor:
        """Return the window's first rows, (filled, 2), once the steps of all ranks are done."""
        if self._ranks is not None:
            wait_for_steps(self._world)
        return self._window[:filled]

    def close(self) -> None:
        """Give the graph back: NCCL waits for those that hold its collectives when it is closed."""
        torch.cuda.synchronize()
        self._graph.reset()

    def wait_seconds(self) -> float:
        """Return the GPU seconds that a step waits for its batch; the last one must be done.

        Of a batch that is fetched a step ahead, what the last step was not in time with.
        """
        return self._batches.waited_seconds() if self._batches.ahead else self.fill_seconds

    def begin_window(self) -> None:
        """Write the next step's loss and norm to row 0 again."""
        self._row.zero_()

    def _run(self) -> None:
        self._batches.begin(timed=True)
        loss = self._gradients(self._batches.batch, valid_steps=self._divisor)
        if self._ranks is not None:
            loss = self._ranks.average(loss, self._batches.batch)
        self._optimizer.finish_on_device(
            loss, index=self._index, row=self._row, window=self._window
        )
        self._batches.end(timed=True)

    def _time_fill(self, step: int) -> float:
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        graph = torch.cuda.CUDAGraph()
        self._batches.enqueue()
        with torch.cuda.graph(graph, stream=_own_stream(), capture_error_mode=CAPTURE_MODE):
            for _ in range(TIMED_FILLS):
                self._batches.enqueue()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        self._batches.set_step(step)
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3 / TIMED_FILLS

    def _warm_up(self, step: int, filled: int) -> None:
        """Run some steps on another stream, as capturing asks for, and undo what they did."""
        saved: list[tuple[Tensor, Tensor]] = [
            # Detached: a copy that knew its parameter would keep the node that sums up the
            # parameter's gradient, made on this stream, and the warm-up would use that.
            (tensor, tensor.detach().clone())
            for tensor in (
                *self._optimizer.weights,
                *self._optimizer.state().values(),
                self._window,
            )
        ]
        random: Any = torch.cuda.get_rng_state(self._window.device)
        cpu_random = torch.get_rng_state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._optimizer.zero_gradients()
                self._row.fill_(0)
                self._index.fill_(step)
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)
        torch.cuda.set_rng_state(random, self._window.device)
        torch.set_rng_state(cpu_random)
        self._put_back(step, filled)

    def _put_back(self, step: int, filled: int) -> None:
        self._row.fill_(filled)
        self._index.fill_(step)
        self._batches.set_step(step)
