"""Train with the Hugging Face `Trainer` on batches of a `GearLoader`.

    python examples/hf_trainer.py data/hopper-medium --steps 1000 --out runs/hf

`gear-offline train` is the shorter way and has less overhead a step.  This example is for those
whose tooling expects a `Trainer`.  What it takes care of, each for a reason:

- The loader gives whole batches, so the `Trainer` gets it as it is.  Passed through
  `accelerate.prepare` it would be wrapped as a data set of samples.
- Several ranks (torchrun) share each batch: the loader is made with `world`, after the arguments,
  which join the ranks.  `batch_size` is that of all ranks together.
- The class has no labels and returns no loss: `compute_loss` does.
- `remove_unused_columns=False`: there are no columns of a `datasets.Dataset` to choose from.
- `logging_nan_inf_filter=False`: the filter reads the loss at every step, which on a GPU waits
  for the step to end.
- `per_device_train_batch_size` only feeds the logged rates; without it they assume 8.
- Resuming skips no batches (`ignore_data_skip=True`): that would draw all of them again.  The
  position of the loader, one number, lies in each checkpoint and is set back.
- Each checkpoint has a policy folder: with the weights it keeps the statistics that the states were
  normalised with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from gear_offline import Dataset, GearLoader, open_dataset
from gear_offline.distributed.world import joined_world
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    beyond_tanh,
    build_model,
    check_timesteps,
    trainable_parameters,
)
from gear_offline.models.loss import mean_loss, step_losses
from gear_offline.models.policy import Policy

POSITION = "loader.json"


class GearTrainer(Trainer):
    """A `Trainer` whose batches come from a `GearLoader`."""

    def __init__(
        self, model: DecisionTransformer, loader: GearLoader, arguments: TrainingArguments
    ) -> None:
        self.loader = loader
        super().__init__(model=model, args=arguments, callbacks=[SavePosition(model, loader)])

    def get_train_dataloader(self) -> Any:
        """Give the loader itself, not prepared: it knows its share of each batch."""
        return Batches(self.loader)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Loss over the actions of real steps; the model computes nothing else."""
        output = model(**inputs, padding=self.loader.padding, only_actions=True)
        mask = inputs["attention_mask"]
        # The real steps of the global batch, divided by the ranks: so the mean of the ranks'
        # gradients, which the Trainer takes, is that of the whole batch.
        valid = (mask != 0).sum().float()
        self.loader.world.sum_into(valid)
        valid = valid.clamp(min=1) / self.loader.world.size
        loss = mean_loss(step_losses(output.action_preds, inputs["actions"]), mask, valid)
        return (loss, output) if return_outputs else loss

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: weights, optimiser, random numbers and the loader."""
        self.loader.load_state_dict(json.loads((checkpoint / POSITION).read_text()))
        self.train(resume_from_checkpoint=str(checkpoint))


class Batches:
    """Batches for the `Trainer`: dictionaries of model inputs, without end."""

    def __init__(self, loader: GearLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.loader.model_inputs()


class SavePosition(TrainerCallback):
    """Writes the policy, and the position of the loader, into each checkpoint."""

    def __init__(self, model: DecisionTransformer, loader: GearLoader) -> None:
        self.model, self.loader = model, loader

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The `Trainer` draws a step's batches inside the step, so the position is exact here."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            policy = Policy(self.model, **dict(self.loader.window))
            policy.save(folder / "policy", overwrite=True)
            partial = folder / f"{POSITION}.partial"
            partial.write_text(json.dumps(self.loader.state_dict()))
            partial.replace(folder / POSITION)


def training_arguments(
    out: Path, *, steps: int, batch_size: int, save_steps: int, **changes: Any
) -> TrainingArguments:
    """Return the paper's optimiser settings and what `GearLoader` needs."""
    options: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": 1e-4,
        "weight_decay": 1e-4,
        "max_grad_norm": 0.25,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10_000,
        "save_steps": save_steps,
        "logging_steps": 100,
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,
        "ignore_data_skip": True,
    }
    return TrainingArguments(**(options | changes))


def make_model(loader: GearLoader, **sizes: Any) -> DecisionTransformer:
    """Build a model for the loader's data."""
    dataset = loader.dataset
    assert isinstance(dataset, Dataset), "several tasks have no statistics in common"
    spec, longest = dataset.spec, int(dataset.episodes.lengths.max())
    actions = spec["actions"]
    discrete = actions.dtype.kind in "iub"
    acted = dataset.statistics["actions"]
    options: dict[str, Any] = {
        "state_dim": spec["observations"].shape[0],
        "action_dim": int(acted.max.max()) + 1 if discrete else actions.shape[0],
        "discrete": discrete,
        "action_tanh": not beyond_tanh(acted.min, acted.max),  # else out of the model's reach
        "max_timestep": longest,
        "context_length": loader.context_length,
    }
    model = build_model(**(options | sizes))
    check_timesteps(longest - 1, model.config.max_ep_len)
    trainable_parameters(model)  # freezes what the loss does not reach
    return model


def last_checkpoint(out: Path) -> Path | None:
    """Return the newest checkpoint that is whole: its position is written last."""
    found = [position.parent for position in out.glob(f"checkpoint-*/{POSITION}")]
    return max(found, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def main() -> None:
    """Train on a dataset of GEAR shards; go on from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="Decision Transformer in a Hugging Face Trainer")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/hf"))
    options = parser.parse_args()
    batch_size = 64
    arguments = training_arguments(
        options.out, steps=options.steps, batch_size=batch_size, save_steps=500
    )
    loader = GearLoader(
        open_dataset(options.dataset),
        batch_size=batch_size,
        returns_scale=1000.0,
        normalize_states=True,
        device=arguments.device,
        world=joined_world(),
    )
    set_seed(arguments.seed)
    model = make_model(loader)
    trainer = GearTrainer(model, loader, arguments)
    last = last_checkpoint(options.out)
    if last is None:
        trainer.train()
    else:
        trainer.resume(last)


if __name__ == "__main__":
    main()
