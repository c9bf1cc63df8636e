"""A whole training step as one CUDA graph: select, gather, forward, backward, clip, AdamW.

The host launches one graph a step and computes nothing: the step number, the learning rate and
the row of the metrics are read and advanced on the GPU.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TrainSettings
from gear_offline.distributed.world import World
from gear_offline.errors import UnavailableError
from gear_offline.kernels.adamw import Update, enqueue_together
from gear_offline.kernels.cuda_module import capturing
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.static_batch import StaticBatch
from gear_offline.training.optimizer import Optimizer
from gear_offline.training.window import ReportWindow

WARM_UPS = 3  # passes before capturing: libraries choose their algorithms and allocate
TIMED_FILLS = 50
LINE = 64  # elements: gradients begin at cache lines, for wide loads, in 16 bits too


def why_not_captured(
    recipe: Recipe,
    device: torch.device,
    world: World,
    loader: GearLoader,
    *,
    sharded: bool,
    freezes: str | None = None,
) -> str | None:
    """Return the reason not to capture steps as a CUDA graph, if there is one.

    `freezes` is that of the model.  If the recipe insists, `UnavailableError` (``UNAVAILABLE``).
    """
    engine, learns = loader.engine, loader.loss_sampler is not None
    reason = capture_obstacle(
        recipe.train,
        ranks=world.size,
        sharded=sharded,
        learns=learns,
        gathers=engine is not None,
        draws=engine is not None and engine.draws,
    )
    reason = reason or freezes
    if device.type != "cuda" and recipe.train.graph != "off":
        reason = "CUDA graphs need a GPU"
    if reason and recipe.train.graph == "on":
        problem = f"train.graph=on is not possible: {reason}"
        remedy = "use train.graph=auto, or see gear-offline doctor"
        raise UnavailableError("UNAVAILABLE", problem, remedy=remedy)
    return reason


def capture_obstacle(
    train: TrainSettings, *, ranks: int, sharded: bool, learns: bool, gathers: bool, draws: bool
) -> str | None:
    """Return the reason not to capture the steps of a GPU, if there is one.

    `learns`: the sampler learns from losses; `gathers`, `draws`: the GPU does so for batches.
    """
    reasons = {
        "train.graph=off": train.graph == "off",
        "graphs of several ranks need replicas": ranks > 1 and sharded,
        "the ranks tell each other the losses of segments": learns
        and (ranks > 1 or train.deterministic == "ranks"),
        "a batch is computed in micro-batches (train.accumulate)": train.accumulate > 1,
        "blocks are computed twice (train.recompute)": train.recompute,
        "batches are not made by the GPU (loader.engine)": not gathers,
        "the host draws when it has heard of the losses": learns and not draws,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def start_compilers() -> None:
    """Start the processes that compile kernels, so that they are there when tracing is done.

    They take some seconds to start, and torch would begin only then.
    """
    with contextlib.suppress(ImportError, AttributeError):  # not a promised part of torch
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


class RunPart:
    """One run's part of a captured step: its batch, its update, its losses and norms.

    `batches` are made from number `batch` on, for the step to come, `step`.  A GPU makes one in
    `fill_seconds`, which are measured if None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: StaticBatch,
        window: ReportWindow,
        *,
        step: int,
        batch: int,
        fill_seconds: float | None = None,
    ) -> None:
        assert optimizer.on_device, "made with captured=True"
        self.optimizer, self.batches, self._window = optimizer, batches, window.rows
        self._parts = window.parts  # the last row is for steps behind the window
        device = window.rows.device
        self._row = torch.full((1,), window.filled, dtype=torch.int64, device=device)
        self._index = torch.full((1,), step, dtype=torch.int64, device=device)
        self._batch = batch
        self.fill_seconds = _time_fill(batches, batch) if fill_seconds is None else fill_seconds
        self.graph: Any = None  # of the whole step, once it is captured

    def update(self, loss: Tensor, parts: Tensor | None = None) -> Update:
        """Return the update, which clips, steps the optimiser, notes loss and norm, and counts.

        The `parts` of several losses are noted at once.
        """
        if parts is not None:
            row = self._row.clamp(max=len(self._parts) - 1)
            self._parts.index_copy_(0, row, parts[None])
        return Update(self.optimizer.on_device, loss, self._index, self._row, self._window)

    def finish(self, loss: Tensor, parts: Tensor | None = None) -> None:
        """Do what `update` returns by itself."""
        enqueue_together([self.update(loss, parts)])

    def finish_capture(self, graph: Any) -> None:
        """Make a captured update ready for replays, whose first batch is the next one again."""
        self.graph = graph
        for group in self.optimizer.on_device:
            group.send_addresses()
        self.batches.set_step(self._batch)

    def wait_seconds(self) -> float:
        """Return the GPU seconds that a step waits for its batch; the last one must be done.

        Where batches are fetched a step ahead, it is the last step's wait for a late one.
        """
        return self.batches.waited_seconds() if self.batches.ahead else self.fill_seconds

    def begin_window(self) -> None:
        """Write the next step's loss and norm to row 0 again."""
        self._row.zero_()

    def close(self) -> None:
        """Give the graph back: NCCL waits for those that hold its collectives when it is closed."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()


def warm_up(run: Callable[[], None], device: torch.device) -> None:
    """Do some passes without an update on another stream, as capturing asks for.

    Only gradients, which the caller drops, are written; a step's update would need copies of
    weights and moments, 14 bytes a parameter, to be undone.  Random numbers are put back.
    """
    random: Any = torch.cuda.get_rng_state(device)
    cpu_random = torch.get_rng_state()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    # The first call of an operator leaves its part of the autograd graph in a cycle, and with
    # it gradients that belong to the stream of the warm-up.
    gc.collect()
    torch.cuda.set_rng_state(random, device)
    torch.set_rng_state(cpu_random)


def capture(run: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Any:
    """Return a CUDA graph of what `run` launches, which may draw from `generators` of its own."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with capturing(graph, _own_stream()):
        run()
    return graph


def _own_stream() -> Any:
    """Return None, for the stream that torch keeps for captures, or a new one where that is another
    GPU's."""
    kept: Any = torch.cuda.graph.default_capture_stream
    if kept is None or kept.device == torch.cuda.current_stream().device:
        return None
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _time_fill(batches: StaticBatch, step: int) -> float:
    """Return the GPU seconds of making one batch with nothing beside it."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    batches.enqueue()

    def fill() -> None:
        for _ in range(TIMED_FILLS):
            batches.enqueue()

    graph = capture(fill)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    batches.set_step(step)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / TIMED_FILLS


class RankGradients:
    """Turns gradients of a rank's share into those of the global batch; without the host.

    DistributedDataParallel keeps bookkeeping on the host between its buckets, which a CUDA graph
    would not repeat. Here all gradients are one run of memory that one all-reduce adds up after the
    backward pass. Nothing is scaled afterwards: the real steps of the global batch are added up
    during the forward pass, and the backward pass starts with their inverse.

    One all-reduce, not buckets beside the pass: matrix products are cut into as many parts as a GPU
    has multiprocessors. Parts whose place NCCL has come last, twice as late. Two H200, 87
    M parameters: 35.30 ms a step, 35.37 with buckets of 50 MiB, 35.76 of 25 MiB, 36.30 of 8 MiB.

    `parameters` are of one type, on one device.  A rank's loss is divided by `divisor` while it is
    computed: any positive number, the same on every rank.
    """

    def __init__(self, parameters: Sequence[Tensor], *, world: World, divisor: float) -> None:
        self._parameters = list(parameters)
        self._size, self._divisor = world.size, divisor
        lines = [-(-parameter.numel() // LINE) * LINE for parameter in parameters]
        *places, total = accumulate(lines, initial=0)
        self._flat = parameters[0].new_zeros(total, requires_grad=False)
        self._slots = [
            self._flat[place : place + parameter.numel()].view(parameter.shape)
            for place, parameter in zip(places, parameters, strict=True)
        ]

    def exchange(self, gradients: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Give every parameter the gradient of the global batch, and return this rank's loss.

        The mean of the ranks' losses is that of the global batch.  `gradients` is the
        `GradientPass` of this rank alone, of parameters without gradients.
        """
        steps = (batch.attention_mask != 0).sum().float()
        counted: Any = dist.all_reduce(steps, async_op=True)

        def weight() -> Tensor:
            counted.wait()
            return self._divisor / steps.clamp(min=1.0)

        loss = gradients(batch, valid_steps=self._divisor, weight=weight)
        # Kept until the end: autograd sums up a gradient on a stream of its choice, and memory that
        # is free again is for the stream that computed it.
        sources: list[Any] = [parameter.grad for parameter in self._parameters]
        torch._foreach_copy_(self._slots, sources)
        work: Any = dist.all_reduce(self._flat, async_op=True)
        work.wait()  # the stream does, not the host
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            parameter.grad = slot
        return loss * self._size
