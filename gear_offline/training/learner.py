"""The learner: model, optimiser, batches and random numbers; `gear_offline.training.step` steps.

Everything a step depends on is in `Learner.tensors`, the model's parameters and the loader's
state, so that a learner that takes them over goes on bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.artifacts.checkpoint import add_prefix, strip_prefix
from gear_offline.artifacts.trained import TrainedModel
from gear_offline.batches.sampling.items import Items
from gear_offline.batches.tables.fields import Window
from gear_offline.batches.tables.joint import TableData
from gear_offline.batches.tables.shared import GrowingTable
from gear_offline.config.recipe import Recipe
from gear_offline.core.text import say
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.gather import Windows
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.options import loader_options, recipe_sampler
from gear_offline.models.base import ModelSizes, SequenceModel, calling_model
from gear_offline.training.cost import Meter, is_compiled
from gear_offline.training.graph import RunPart, start_compilers, why_not_captured
from gear_offline.training.model import make_training_model
from gear_offline.training.optimizer import Optimizer
from gear_offline.training.parallel import take_over
from gear_offline.training.seeding import random_states, restore_random
from gear_offline.training.validation import Validation
from gear_offline.training.window import ReportWindow

MEASURED = ("step", "loss", "gradient_norm", "learning_rate")  # names that losses may have too
WITHOUT_WEIGHTS = ("dropout", "max_timestep")  # options of the moment
SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of two ranks
ITEMS, SELECTION = "items/", "selection/"  # before the names of their arrays in a checkpoint


class Learner:
    """A model in training.

    Call it under the torch seed of the run: building the model draws from torch's generator, and
    so does dropout afterwards.

    `recipe` is resolved (`gear_offline.runs.resolve`).  Each rank of `world` has a learner; they
    step and call `report` and `tensors` together.  `growing` is where a `dataset` comes from that
    grows, `start` the model that ``train.init`` names.
    """

    def __init__(
        self,
        recipe: Recipe,
        sizes: ModelSizes,
        dataset: TableData,
        device: torch.device,
        *,
        world: World | None = None,
        growing: GrowingDataset | None = None,
        start: TrainedModel | None = None,
    ) -> None:
        assert (start is None) == (recipe.train.init is None), "a start is what train.init names"
        self.recipe, self.device = recipe, device
        self.world = world = World() if world is None else world
        self._start = None if start is None else start.window
        if start is not None and start.run is not None and world.is_first:
            _say_other_options(recipe, start.recipe)
        self.growing, self._table, self._items = growing, GrowingTable(), Items(recipe)
        opened = cache(partial(self._open_loader, dataset))
        built = make_training_model(
            recipe,
            sizes,
            device,
            world,
            lambda: opened().batch_at(0),
            None if start is None else start.model,
        )
        for remark in built.trial.remarks if world.is_first else ():
            say(remark)
        self.model, self.working, self.parallel = built.model, built.working, built.parallel
        self.precision, self.precision_reason = built.autocast, built.remark
        self.loader = opened()
        if self.loader.loss_sampler is not None:
            _check_learns(recipe, self.loader.selection.name, self.model)
        self._batches = iter(self.loader)
        self.graph_reason = why_not_captured(
            recipe,
            device,
            world,
            self.loader,
            sharded=self.parallel.sharded,
            freezes=built.trial.freezes or built.model.uncaptured,
        )
        self.is_captured = self.graph_reason is None  # else steps are launched one by one
        if is_compiled(recipe.train) and self.is_captured:
            start_compilers()
        with calling_model(self.model, "parameter_groups()"):
            described = self.model.parameter_groups(recipe.optimizer)
            groups = [{**group, "params": [*group["params"]]} for group in described]
        self.optimizer = Optimizer(
            self.model,
            recipe.optimizer,
            steps=recipe.train.steps,
            captured=self.is_captured,
            device=device,
            working=None if self.working.model is self.model else self.working.model,
            groups=groups,
        )
        self.part: RunPart | None = None  # of a captured step, made by `join`
        if world.rank:  # each rank but the first one draws dropout from a stream of its own
            torch.manual_seed((recipe.seed + world.rank * SEED_STRIDE) % (1 << 63))
        segments, half = self.loader.rank_batch, built.half
        self.meter = Meter(recipe, self.model, segments, device, half=half)
        self.loss_names = built.trial.names or self.model.loss_names
        self.step = 0
        self.validation: Validation | None = None
        if recipe.data.held_out is not None:
            self.validation = Validation(recipe, self._normalized(dataset), device, world)
        self.window = ReportWindow(recipe.train.log_every, device, len(self.loss_names))

    def _open_loader(self, dataset: TableData, *, step: int = 0) -> GearLoader:
        recipe, table = self.recipe, None
        sampler = recipe_sampler(recipe, dataset, items=self._items, step=step)
        dataset = self._normalized(dataset)
        if self.growing is not None and self.world.size == 1:
            assert isinstance(dataset, Dataset), "data of several tasks do not grow"
            table = self._table.grow(dataset, loader_options(recipe, dataset))
        # spread rows are shared by who has them, pieces of a batch by their order
        whole: Any = {"sharding": "replicate"} if recipe.train.deterministic == "ranks" else {}
        loader = GearLoader.of_recipe(
            recipe,
            dataset=dataset,
            selection=sampler,
            start_step=step,
            device=self.device,
            world=self.world,
            **whole,
        )
        del table  # the loader has got it
        return loader

    def _normalized(self, dataset: TableData) -> TableData:
        """Return the dataset, normalised by what the run goes on from, if it does so."""
        if self._start is None:
            return dataset
        assert isinstance(dataset, Dataset), "a start is of one task"
        return _normalized_by(dataset, self._start, self.recipe.loader.observations)

    def admit(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Admit, before the next step, what actors have appended; all ranks together.

        Returns False if it was stopped while the step has to wait for more.
        """
        growing, data = self.growing, self.recipe.data
        if growing is None or data.admit_every is None or self.step % data.admit_every:
            return True
        before = growing.admissions
        timeout = 0.9 * self.recipe.train.timeout  # the other ranks wait as long for this one
        step, items, ahead = self.loader.step, self._items, self.recipe.train.steps - self.step
        items.advance(step, coming=min(data.admit_every, ahead))

        def missing(dataset: Dataset) -> str | None:
            items.insert(dataset)
            return items.missing()

        # what a run's own actors had appended before it was killed belongs to a look to come
        waits = data.actors is not None and not growing.is_open(self.step)

        self.world.lead(
            lambda: growing.admit(
                self.step,
                may_admit=(lambda episodes, behind: False) if waits else items.may_admit,
                missing=missing,
                timeout=timeout,
                is_stopped=is_stopped,
            )
        )
        is_ready = not (is_stopped() and missing(growing.dataset))
        admissions, answer = self.world.gather((growing.admissions, is_ready))[0]
        if admissions > before:
            self._grow(growing.follow(admissions), step)
        return bool(answer)

    def _grow(self, dataset: Dataset, step: int) -> None:
        """Go on with batches of a dataset that has become larger."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of the smaller table fit nothing of the larger one
        before, self.loader = self.loader, self._open_loader(dataset, step=step)
        sampler = self.loader.loss_sampler
        if sampler is not None and before.loss_sampler is not None:
            sampler.take_over(before.loss_sampler)
        if self.is_captured and self.loader.engine is None:
            problem = "the data have grown beyond what the GPU gathers, which captured steps need"
            raise GearError("MEMORY", problem, self.recipe.name, "train it with train.graph=off")
        is_kept = self.part is not None and self.loader.hand_over(self.part.batches)
        if not all(self.world.gather(is_kept)):
            self.release()
            self.part = None  # a step is captured anew
        before.close()
        self._batches = iter(self.loader)

    @property
    def step_kind(self) -> str:
        """The way steps are run on a GPU, and the reason, as a clause to print."""
        if self.device.type != "cuda":
            return ""
        if not self.is_captured:
            return f", steps launched one by one: {self.graph_reason}"
        engine = self.loader.engine
        return f", one CUDA graph a step, {engine.reason if engine else ''}"

    def begin_step(self) -> Batch:
        """Return the batch of a step that is launched kernel by kernel."""
        self.window.start()
        self.pass_skipped()
        batch = next(self._batches)
        self.window.note_wait()
        self.optimizer.zero_gradients()
        return batch

    def finish_step(self, loss: Tensor) -> None:
        """Update the weights by the gradients that they have."""
        if self.optimizer.on_device:
            self.optimizer.finish(self.step, loss, self.window.rows, self.window.filled)
            self.window.count()
        else:
            self.window.count(loss, self.optimizer.clip())
            if self.device.type == "cpu":
                self.window.check(self.step + 1, self.recipe.name, newest=True)
            self.optimizer.update(self.step)
        with torch.no_grad():
            self.model.after_step()
        self.step += 1
        self.window.stop()

    def pass_skipped(self) -> None:
        """Move the batches past those that `train.skip` leaves out here, if there are any."""
        ahead = self.recipe.train.batch_of(self.step) - self.loader.step
        if ahead:
            self.loader.skip(ahead)
            if self.part is not None:  # it stands behind the step that was launched last
                self.part.batches.set_step(self.loader.step)

    def count_replay(self) -> None:
        """Count a captured step that was launched."""
        self.loader.skip()
        self.step += 1
        self.window.count()

    def join(
        self, windows: Sequence[Windows] = (), *, fill_seconds: float | None = None
    ) -> RunPart:
        """Return this learner's part of a captured step, whose batches lie in `windows` if given.

        `fill_seconds` are those of another run's batches of the same shape, not measured again.
        Who captures it calls `count_replay` after each launch.
        """
        self.part = RunPart(
            self.optimizer,
            self.loader.static_batch(ahead=True, windows=windows, live=self.growing is not None),
            self.window,
            step=self.step,
            batch=self.loader.step,
            fill_seconds=fill_seconds,
        )
        return self.part

    def check(self) -> None:
        """Raise `GearError` (``LOSS_NONFINITE``) if a loss or gradient since the last report is
        not finite."""
        self.window.start()
        if self.part is not None and self.world.size > 1:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.world.wait_for_gpu(event)
        self.window.check(self.step, self.recipe.name)
        self.window.stop()  # a GPU's steps are done only now

    def report(self) -> dict[str, float]:
        """Return means over the steps since the last report, and begin anew.

        Without rates where another process did all of them, before the run was resumed.
        """
        self.check()
        window = self.window
        window.start()
        loss, norm, *parts = window.of_all(self.world).cpu().double().mean(0).tolist()
        window.stop()
        steps, busy = window.timed, window.busy_seconds
        if self.part is not None and steps:
            window.wait_seconds = steps * self.part.wait_seconds()
        rate = self.optimizer.rate(self.step - 1)
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate}
        for name, value in zip(self.loss_names, parts, strict=True):
            values[part_name(name)] = value
        values |= self.model.measures()
        if steps:  # fewer than the window has when the run was resumed in it
            values |= {
                "step_seconds": busy / steps,
                "data_wait_share": window.wait_seconds / busy,
                "samples_per_second": steps * self.recipe.loader.batch_size / busy,
                **self.meter.add(steps, busy),
            }
        window.begin()
        if self.part is not None:
            self.part.begin_window()
        return values

    def validate(self) -> dict[str, float]:
        """Return the losses of the episodes that are held out, by names to log; all ranks do."""
        if self.validation is None:
            return {}
        total, *parts = self.validation.losses(self.working, self.precision).values()
        names = (part_name(name) for name in self.loss_names)  # none of a single loss
        values = {"loss": total} | dict(zip(names, parts, strict=False))
        return add_prefix("validation/", values)

    def tensors(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors besides parameters and loader; moments as they lie."""
        self.check()
        tensors = self.optimizer.state() | random_states(self.world, self.device)
        tensors["window"] = self.window.of_all(self.world)
        arrays = add_prefix(ITEMS, self._items.state(self.loader.step))
        if self.loader.loss_sampler is not None:
            arrays |= add_prefix(SELECTION, self.loader.loss_sampler.state())
        return tensors | {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load(
        self,
        *,
        step: int,
        model: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        loader: Mapping[str, Any],
    ) -> None:
        """Take over the state of another learner of the same recipe.

        Tensors that are not those of such a learner are KeyError or RuntimeError.
        """
        take_over(self.model.state_dict(), model)
        self.optimizer.refresh()
        self.optimizer.load_state(tensors)
        if items := strip_prefix(tensors, ITEMS):
            self._items.load_state({name: tensor.numpy() for name, tensor in items.items()})
        if self.growing is not None:
            # not by steps: another run may have admitted pieces at earlier ones since
            known = loader.get("admissions")
            dataset = self.growing.follow(known[0]) if known else self.growing.go_to(step)
            self._grow(dataset, loader["step"])
        if self.loader.loss_sampler is not None:
            masses = strip_prefix(tensors, SELECTION)
            state = {name: tensor.numpy() for name, tensor in masses.items()}
            self.loader.loss_sampler.load_state(state)
        self.loader.load_state_dict(dict(loader))
        self._batches = iter(self.loader)
        restore_random(tensors, self.world, self.device)
        self.window.load(tensors["window"])
        self.step = step

    def close(self) -> None:
        """Give back what the loaders hold open; all ranks together."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()

    def release(self) -> None:
        """Give back what would keep the ranks' connections from being closed; after errors too."""
        if self.part is not None and self.world.size > 1:
            self.part.close()


def part_name(loss: str) -> str:
    """Return the name under which one of several losses is logged."""
    return f"{loss}_part" if loss in MEASURED else loss


def _check_learns(recipe: Recipe, strategy: str, model: SequenceModel) -> None:
    """Refuse what a selection that learns from losses cannot be trained with."""
    if recipe.train.accumulate > 1:
        problem = "a strategy that learns from losses needs them of the whole batch at once"
        remedy = "use train.accumulate=1, or another strategy"
        raise InputError("LOADER_OPTION", problem, "train.accumulate", remedy)
    if model.stochastic:
        problem = f"{strategy} weighs segments by losses, a likelihood's may be negative"
        remedy = "use another selection.strategy, or model.policy=deterministic"
        raise InputError("SELECTION", problem, "model.policy", remedy)
    if recipe.train.skip:
        problem = f"what {strategy} draws depends on losses before: episodes left out come again"
        raise InputError("SELECTION", problem, "train.skip", "use train.skip=[]")


def _say_other_options(recipe: Recipe, start: Recipe) -> None:
    """Say which options of the model differ from those that the first weights were learnt with."""
    now, before = recipe.model.model_dump(), start.model.model_dump()
    differ = [
        f"model.{name} {now[name]} in place of {value}"
        for name, value in before.items()
        if name in now and now[name] != value and name not in WITHOUT_WEIGHTS
    ]
    if differ:
        say(f"train.init={recipe.train.init}: its weights go on with {', '.join(differ)}")


def _normalized_by(dataset: Dataset, window: Window, observations: Sequence[str]) -> Dataset:
    """Return the dataset as if the moments of a window were those of its observations."""
    if not any(column.state_mean for column in window.columns):
        return dataset
    statistics = dict(dataset.manifest.statistics)
    for name, column in zip(observations, window.columns, strict=True):
        if column.state_mean is not None and column.state_std is not None:
            own = statistics[name]
            moments = {"mean": column.state_mean, "std": column.state_std}
            update = {key: np.array(v).reshape(own.mean.shape) for key, v in moments.items()}
            statistics[name] = own.model_copy(update=update)
    manifest = dataset.manifest.replace_fields(statistics=statistics)
    return replace(dataset, manifest=manifest, frozen=True)
