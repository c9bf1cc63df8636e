"""The loss of episodes that are held out: of the same windows each time, each counted once.

Nothing of it shows in training: random numbers, modes and buffers are put back.

Shape legend: B windows of a rank's share of a batch, K steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gear_offline.batches.sampling.registry import sampler_for
from gear_offline.batches.tables.joint import JointDataset, TableData, join_datasets
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import Closing
from gear_offline.data.dataset.split import held_out_part
from gear_offline.distributed.world import World
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.base import Losses, calling_model, total_loss
from gear_offline.training.seeding import own_random, seed_all

SEED = 0  # of the windows, for all runs alike


class Validation(Closing):
    """The windows of what a recipe holds out of a dataset; the ranks share each of its batches."""

    def __init__(
        self, recipe: Recipe, dataset: TableData, device: torch.device, world: World
    ) -> None:
        self.dataset, self._world, size = (
            _held_out(dataset, recipe),
            world,
            recipe.loader.batch_size,
        )
        self.windows = min(self.dataset.spec.steps, recipe.train.validation_batches * size)
        span = recipe.loader.context_length
        self._loader = GearLoader.of_recipe(
            recipe,
            dataset=self.dataset,
            selection=sampler_for("shuffled_epochs", self.dataset, {}, context_length=span),
            seed=SEED,
            device=device,
            world=world,
        )

    def losses(self, working: Losses, precision: torch.dtype | None) -> dict[str, float]:
        """Return the mean over the windows' real steps of each loss by name; "" is their sum."""
        modes = [(module, module.training) for module in working.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in working.buffers()]
        size, device, sums = self._loader.batch_size, self._loader.device, dict[str, Tensor]()
        half = torch.autocast(device.type, dtype=precision, enabled=precision is not None)
        try:
            with own_random(device), torch.no_grad(), half:
                working.eval()
                seed_all(SEED)
                for number in range(-(-self.windows // size)):
                    batch, slots = self._loader.batch_at(number), self._loader.slots_at(number)
                    is_first = torch.from_numpy(number * size + slots < self.windows)
                    real = (batch.attention_mask != 0) & is_first.to(device)[:, None]
                    with calling_model(working.model, "computing validation/loss"):
                        named = working(batch)
                    every = {"": total_loss(named), **named, "steps/": real.float()}
                    for name, losses in every.items():
                        total = losses.detach().where(real, 0.0).sum(dtype=torch.float64)
                        sums[name] = sums.get(name, 0.0) + total
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, before in buffers:
                buffer.copy_(before)
        totals = torch.stack([*sums.values()])
        self._world.sum_into(totals)
        values = dict(zip(sums, totals.tolist(), strict=True))
        steps = values.pop("steps/")
        return {name: value / steps for name, value in values.items()}

    def close(self) -> None:
        """Give back what the loader holds open; all ranks together."""
        self._loader.close()


def _held_out(dataset: TableData, recipe: Recipe) -> TableData:
    """Return the episodes that a dataset, or each of several, leaves out."""
    observed = recipe.loader.observations
    if not isinstance(dataset, JointDataset):
        return held_out_part(dataset, observed)
    tasks = [replace(task, dataset=held_out_part(task.dataset, observed)) for task in dataset.tasks]
    return join_datasets(tasks)
