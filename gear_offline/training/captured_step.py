"""A whole training step as one CUDA graph: select, gather, forward, backward, clip, AdamW.

The host launches one graph a step and computes nothing: the step number, the learning rate and
the row of the metrics are read and advanced on the GPU.

Shape legend: n rows of the window of losses and gradient norms.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.distributed.world import World
from gear_offline.errors import UnavailableError
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.training.captured_part import CapturedPart, capture, warm_up
from gear_offline.training.data_parallel import GradientPass
from gear_offline.training.graph_watch import wait_for_steps
from gear_offline.training.optimizer import Optimizer
from gear_offline.training.parallel import Parallel
from gear_offline.training.rank_gradients import RankGradients

if TYPE_CHECKING:
    from gear_offline.loaders.feedback import DeviceFeedback
    from gear_offline.loaders.loader import GearLoader
    from gear_offline.loaders.static_batch import StaticBatch


def start_compilers() -> None:
    """Start the processes that compile kernels, so that they are there when tracing is done.

    They take some seconds to start, and torch would begin only then.
    """
    with contextlib.suppress(ImportError, AttributeError):  # not a promised part of torch
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


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
    elif world.node_count > 1 and train.graph == "auto":
        reason = "several nodes exchange gradients"  # nobody has run that yet
    elif world.size > 1 and sharded:
        reason = "graphs of several ranks need replicas"
    elif world.size > 1 and loader.loss_sampler is not None:
        reason = "the ranks tell each other the losses of segments"
    elif train.accumulate > 1:
        reason = "a batch is computed in micro-batches (train.accumulate)"
    elif train.recompute:
        reason = "blocks are computed twice (train.recompute)"
    elif loader.engine is None:
        reason = "batches are not made by the GPU (loader.engine)"
    elif loader.loss_sampler is not None and not loader.engine.draws:
        reason = "the host draws when it has heard of the losses"
    if reason and train.graph == "on":
        raise UnavailableError(
            "GRAPH_UNAVAILABLE",
            f"train.graph=on is not possible: {reason}",
            remedy="use train.graph=auto, or see gear-offline doctor",
        )
    return reason


class CapturedStep(CapturedPart):
    """One optimiser step, captured once and replayed.

    Building it runs some steps; weights, moments, random numbers and the batches' position
    are put back afterwards, so that nothing of them stays.  It is captured on torch's current
    stream if that is not the default one: graphs that run at once must not share a stream's
    workspace of cuBLAS.

    Parameters
    ----------
    model
        In training mode, on the batches' device.
    optimizer, batches, window, step, filled
        As `CapturedPart`.
    precision
        Autocast type, ``None`` for float32.
    compiled
        Compile forward and loss.
    feedback
        Of those batches, for selections that learn from losses.
    world
        The ranks that train together; all build theirs and replay it together.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        optimizer: Optimizer,
        batches: StaticBatch,
        window: Tensor,
        *,
        step: int,
        filled: int,
        precision: torch.dtype | None,
        compiled: bool,
        feedback: DeviceFeedback | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__(optimizer, batches, window, step=step, filled=filled)
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
        if world is not None and world.size > 1:
            self._ranks = RankGradients(
                optimizer.computed,
                world=world,
                divisor=float(batches.batch.attention_mask.numel()),
            )
        self._graph = torch.cuda.CUDAGraph()
        with contextlib.nullcontext() if feedback is None else feedback.paused():
            warm_up(self._rehearse, self.written(), window.device)
            self.put_back()
        optimizer.zero_gradients()
        if self._ranks is not None and world is not None:
            torch.cuda.synchronize()
            world.gather(None)  # nobody captures while others still connect
        capture(self._graph, self._run)
        self.finish_capture()

    def replay(self) -> None:
        """Do the next step; returns at once."""
        self._batches.prepare()
        self._graph.replay()

    def rows(self, filled: int) -> Tensor:
        """Return the window's first rows, (filled, 2), once the steps of all ranks are done."""
        if self._ranks is not None:
            wait_for_steps(self._world)
        return super().rows(filled)

    def close(self) -> None:
        """Give the graph back: NCCL waits for those that hold its collectives when it is closed."""
        torch.cuda.synchronize()
        self._graph.reset()

    def _run(self) -> None:
        self._batches.begin(timed=True)
        batch = self._batches.batch
        if self._ranks is None:
            loss = self._gradients(batch)
        else:
            loss = self._ranks.exchange(self._gradients, batch)
        self.finish(loss)
        self._batches.end(timed=True)

    def _rehearse(self) -> None:
        self._optimizer.zero_gradients()
        self.repeat()
        self._run()
