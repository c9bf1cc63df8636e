"""One optimiser step of a learner: launched kernel by kernel, or as one CUDA graph.

`gear_offline.training.stack` has that of several learners.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.loaders.feedback import DeviceFeedback, LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.base import calling_model
from gear_offline.models.kinds import MODELS
from gear_offline.training.cost import is_compiled
from gear_offline.training.gradients import GradientPass
from gear_offline.training.graph import RankGradients, capture, warm_up
from gear_offline.training.learner import Learner
from gear_offline.training.pieces import PieceGradients
from gear_offline.training.seeding import seed_host


class Step(ABC):
    """One optimiser step of one or more learners."""

    @abstractmethod
    def run(self) -> Mapping[Learner, GearError]:
        """Advance each learner by a step; return what ended some of them.

        A loss that is not finite is `GearError` (``LOSS_NONFINITE``).  The CPU raises it before it
        touches the weights.  A GPU is not waited for at each step: the learner's next `report` or
        `check` raises it.  A collective that fails is ``RANK_LOST``.
        """

    def wait(self) -> None:  # noqa: B027
        """Wait for the GPU, on the clocks of several learners."""

    def leave(self, learner: Learner) -> None:  # noqa: B027
        """Advance one of several learners no more."""


class EagerStep(Step):
    """A step whose kernels are launched one by one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._gradients: GradientPass | PieceGradients | None = None  # made by the first step
        self._loader: GearLoader | None = None  # of the last step

    def run(self) -> Mapping[Learner, GearError]:
        learner = self.learner
        with _naming(learner, f"step {learner.step + 1:,} of training"):
            gradients = self._gradients = self._gradients or self._make_gradients()
            if self._loader is not learner.loader:  # the first one, or the data have grown
                self._loader = learner.loader
                if learner.loader.loss_sampler is not None:
                    exact = learner.recipe.train.deterministic == "ranks"
                    gradients.feedback = LossFeedback(learner.loader, exact=exact)
            seed_host(learner.recipe.seed, learner.world.rank, learner.step)
            if isinstance(gradients, PieceGradients):
                gradients.seed(learner.step)
            batch = learner.begin_step()
            with learner.world.guard("training"):
                loss = gradients(batch)
                if gradients.parts is not None:
                    learner.window.parts[learner.window.filled] = gradients.parts
                learner.finish_step(loss)
        return {}

    def _make_gradients(self) -> GradientPass | PieceGradients:
        learner, train = self.learner, self.learner.recipe.train
        model_kind = learner.recipe.model.kind
        if train.deterministic == "ranks":
            alone = GradientPass(learner.working, World(), precision=learner.precision)
            return PieceGradients(alone, learner.optimizer.working, learner.recipe, learner.world)
        return GradientPass(
            learner.working,
            learner.world,
            parallel=learner.parallel,
            compiled=is_compiled(train) and learner.device.type == "cuda",
            accumulate=train.accumulate,
            precision=learner.precision,
            fixed_buckets=bool(train.deterministic) or model_kind not in MODELS.own,
        )


class GraphStep(Step):
    """A step as one CUDA graph, captured once and replayed, by all ranks together.

    Capturing runs some passes; random numbers and the batches' position are put back afterwards,
    so that nothing of them stays.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def run(self) -> Mapping[Learner, GearError]:
        learner, remedy = self.learner, ""
        doing = f"step {learner.step + 1:,} of training"
        if learner.part is None:
            doing, remedy = "capturing a step as a CUDA graph", "use train.graph=off"
        with _naming(learner, doing, remedy):
            learner.window.start()
            learner.pass_skipped()
            if learner.part is None:  # or no more, since the data have grown
                self._capture()
                learner.window.start()  # that was no part of this step
            self.replay()
            learner.count_replay()
            learner.window.stop()
        return {}

    def replay(self) -> None:
        """Launch the next step; returns at once."""
        self._part.batches.prepare()
        if self._pieces is not None:
            self._pieces.seed(self.learner.step)
        self._part.graph.replay()

    def capture(self) -> None:
        """Capture the step, of a part whose kernels have run before."""
        generators = [] if self._pieces is None else self._pieces.generators
        self._part.finish_capture(capture(self._run, generators))

    def _capture(self) -> None:
        learner, world, feedback = self.learner, self.learner.world, None
        part = self._part = learner.join()
        if learner.loader.loss_sampler is not None:
            feedback = DeviceFeedback(learner.loader, part.batches)
        alone = GradientPass(  # of this rank
            learner.working,
            World(),
            compiled=is_compiled(learner.recipe.train),
            feedback=feedback,
            precision=learner.precision,
        )
        self._pieces: PieceGradients | None = None
        self._ranks: RankGradients | None = None
        if learner.recipe.train.deterministic == "ranks":
            parameters, recipe = learner.optimizer.working, learner.recipe
            self._pieces = PieceGradients(
                alone, parameters, recipe, world, graph_device=learner.device
            )
        elif world.size > 1:
            divisor = float(part.batches.batch.attention_mask.numel())
            self._ranks = RankGradients(part.optimizer.working, world=world, divisor=divisor)
        self._gradients = self._pieces or alone
        buffers = [(buffer, buffer.clone()) for buffer in alone.buffers]
        with contextlib.nullcontext() if feedback is None else feedback.pause_updates():
            warm_up(self._rehearse, learner.device)
        for buffer, before in buffers:
            buffer.copy_(before)
        part.optimizer.zero_gradients()
        if world.size > 1:
            torch.cuda.synchronize()
            world.gather(None)  # nobody captures while others still connect
        self.capture()

    def _run(self) -> None:
        self._part.batches.begin(timed=True)
        self._part.finish(self._pass(), self._gradients.parts)
        with torch.no_grad():
            self.learner.model.after_step()
        self._part.batches.end(timed=True)

    def _rehearse(self) -> None:
        self._part.optimizer.zero_gradients()
        self._part.batches.begin(timed=True)
        self._pass()
        self._part.batches.end(timed=True)

    def _pass(self) -> Tensor:
        batch = self._part.batches.batch
        if self._ranks is None:
            return self._gradients(batch)
        loss = self._ranks.exchange(self._gradients, batch)
        if self._gradients.parts is not None:
            self._gradients.parts = self._gradients.parts * self.learner.world.size
        return loss


@contextlib.contextmanager
def _naming(learner: Learner, doing: str, remedy: str = "") -> Iterator[None]:
    """Name the step in errors of somebody else's model."""
    try:
        yield
    except Exception:
        with calling_model(learner.model, doing, remedy):
            raise
