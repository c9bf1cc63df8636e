"""A recipe: one YAML file that says data, loader, model, optimiser, training and evaluation.

The classes are the list of all options; the text under each field is its documentation.  Every
default is the value of the Decision Transformer paper's locomotion experiments (Chen et al. 2021,
arXiv:2106.01345, and its public code).  Everything is checked when a recipe is built: whatever is
wrong becomes one `InputError` with the dotted path of the option.

`gear_offline.recipe_files` finds, merges and copies recipe files; `load_recipe` is the way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gear_offline.errors import InputError
from gear_offline.recipe_errors import DEVICE_PATTERN, NAME_PATTERN, to_input_error
from gear_offline.recipe_files import RecipeEntry, copy_recipe, list_recipes, read_merged
from gear_offline.strict_yaml import dump_yaml, whole_number

__all__ = [
    "Recipe",
    "RecipeEntry",
    "copy_recipe",
    "list_recipes",
    "load_recipe",
    "validate_recipe",
]

Whole = Annotated[int, BeforeValidator(whole_number)]  # 100000, 1e5 or 100_000
Positive = Annotated[Whole, Field(ge=1, lt=1 << 62)]
Count = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Frozen, strict (no ``"3"`` for 3), no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class CollectSettings(Section):
    """Data made on the spot when `data.path` does not exist yet."""

    environment: Text
    """Gymnasium id, e.g. Pendulum-v1."""
    policy: Text = "random"
    """Who acts, as `gear-offline collect --policy` takes it."""
    quality: Text | None = None
    """With policy ars: expert, medium, replay, medium-expert or mixed."""
    mix: dict[Text, PositiveFloat] | None = None
    """In place of a quality: parts and their shares of the steps."""
    steps: Positive = 10_000
    """Steps to record; the last episode is recorded to its end."""
    action_noise: Annotated[float, Field(ge=0.0)] = 0.0
    """Gaussian noise on the policy's actions, in half ranges of the action."""
    train_steps: Positive | None = None
    """Steps of making the policy; an iteration of ARS is finished; null: the maker's own limit."""
    gate: float | None = None
    """Least mean return the best policy must have recorded; else nothing is written."""
    seed: Seed = 0
    """Seed of the environments and of the policy's making."""


class DataSettings(Section):
    """Where the steps come from."""

    path: Text | None = None
    """Directory of GEAR shards, relative to the current directory."""
    source: Text | None = None
    """What to convert into `path` when it does not exist: a file, d4rl:NAME or minari:ID."""
    verify: bool = True
    """Check every byte of the shards when they are opened."""
    collect: CollectSettings | None = None
    """What to record and convert into `path` when it does not exist, instead of `source`."""


class LoaderSettings(Section):
    """What a batch is."""

    batch_size: Positive = 64
    """Segments in a batch (B)."""
    context_length: Annotated[Whole, Field(ge=1, le=65_536)] = 20
    """Steps in a segment (K)."""
    frame_stack: Annotated[int, Field(ge=1, le=64)] = 1
    """Frames that make up a state, for data with one image a step."""
    padding: Literal["right", "left"] = "right"
    """Side on which segments shorter than K are filled up."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount of the returns-to-go."""
    returns_scale: PositiveFloat = 1000.0
    """Returns-to-go are divided by this, in training and in evaluation."""
    normalize_states: bool = True
    """Subtract the dataset's mean from the observations and divide by its deviation."""
    mode: Literal["read", "mmap"] = "read"
    """Keep the columns in memory, or map the files."""
    engine: Literal["auto", "on", "off"] = "auto"
    """On CUDA: select and gather on the GPU; auto: where that is possible."""
    placement: Literal["auto", "hbm", "peer", "host", "disk"] = "auto"
    """Rows in GPU memory, over the node's GPUs, in host memory or on disk; auto: as they fit."""
    hbm_budget: Positive | None = None
    """Bytes of GPU memory that rows may take; null: 60 % of what is free."""
    host_budget: Positive | None = None
    """For auto and disk, bytes of host memory for rows; null: half of it if on disk, else all."""
    sharding: Literal["auto", "replicate", "shard"] = "auto"
    """With several nodes: each holds all, or its shards; auto: its shards where all do not fit."""
    exchange: Literal["auto", "on", "off"] = "auto"
    """Rows of other nodes by RDMA: on; by torch.distributed: off; auto: RDMA where it works."""


class SelectionSettings(Section):
    """Which segments make up a batch."""

    strategy: Text = "uniform_steps"
    """Name of a selection strategy."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The strategy's own options."""


class ModelSettings(Section):
    """Size and shape of the Decision Transformer."""

    hidden_size: Positive = 128
    """Width of the embeddings; a multiple of `heads`."""
    layers: Positive = 3
    """Transformer blocks."""
    heads: Positive = 1
    """Attention heads of a block."""
    activation: Literal["relu", "gelu", "silu", "tanh", "gelu_new"] = "relu"
    """Activation of the feed-forward part."""
    dropout: Fraction = 0.1
    """Probability of dropout, in residuals, embeddings and attention."""
    max_timestep: Positive | None = 1000
    """Longest episode the model can place; null: the longest of the data and the environment."""
    action_tanh: bool = True
    """Squash predicted actions into [-1, 1]; false where the actions go beyond."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation."""
    encoder: Literal["auto", "none", "cnn", "patch"] = "auto"
    """Of frames: the DQN's convolutions, or linear maps of patches; auto: cnn for frames."""


class OptimizerSettings(Section):
    """AdamW with gradient clipping and a linear warm-up."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 1e-4
    """Decoupled weight decay of all parameters."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """Averaging factors of the first and second moment."""
    clip_norm: PositiveFloat | None = 0.25
    """Largest norm of the gradient; null: no clipping."""
    warmup_steps: Count = 10_000
    """Steps over which the learning rate rises from zero; at most train.steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at train.steps."""


class TrainSettings(Section):
    """How long, on what, and how often to look."""

    steps: Positive = 100_000
    """Optimiser steps."""
    device: Annotated[str, StringConstraints(pattern=DEVICE_PATTERN)] = "auto"
    """auto: CUDA where there is one, else the CPU."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bfloat16 autocast on CUDA devices that have it, float32 elsewhere."""
    graph: Literal["auto", "on", "off"] = "auto"
    """On CUDA: the whole step as one CUDA graph; auto: where that is possible."""
    compile: Literal["auto", "on", "off"] = "auto"
    """With the graph: torch.compile; auto: for runs of 20,000 steps or more."""
    threads: Positive | None = None
    """CPU threads of torch; null: torch decides."""
    log_every: Annotated[Whole, Field(ge=1, le=1_000_000)] = 100
    """Steps between two lines of metrics.jsonl."""
    checkpoint_every: Positive = 10_000
    """Steps between two checkpoints."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints that are kept; the best one stays too."""
    evaluate_every: Positive | None = 10_000
    """Steps between two evaluations; null: at the end only."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


class EvaluateSettings(Section):
    """Rollouts of the policy that was learnt."""

    environment: Text | None = None
    """Gymnasium id; null: the one that the dataset names, no evaluation if it names none."""
    reference: Text | None = None
    """D4RL name whose reference scores normalise returns; null: the dataset's own."""
    targets: tuple[float, ...] | None = Field(default=None, strict=False)
    """Returns to ask for; null: the best return in the data and the mean one."""
    episodes: Count = 100
    """Episodes for each target; 0: no evaluation."""
    environments: Positive = 20
    """Environments that step together."""
    seed: Seed = 1000
    """Seed of the first evaluation environment."""


class Recipe(Section):
    """One training run, from data to score."""

    name: Name
    """Name of the recipe and of its run directory."""
    description: str = ""
    """One line for `recipes ls`."""
    seed: Seed = 0
    """Seed of the model's weights, of dropout and of the selection."""
    data: DataSettings = DataSettings()
    loader: LoaderSettings = LoaderSettings()
    selection: SelectionSettings = SelectionSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        model, optimizer = self.model, self.optimizer
        if model.hidden_size % model.heads:
            raise InputError(
                "RECIPE_VALUE",
                f"model.hidden_size must be a multiple of model.heads ({model.heads}), "
                f"got {model.hidden_size}",
                remedy=f"try {-(-model.hidden_size // model.heads) * model.heads}",
            )
        if optimizer.warmup_steps > self.train.steps:
            raise InputError(
                "RECIPE_VALUE",
                f"optimizer.warmup_steps must not exceed train.steps ({self.train.steps}), "
                f"got {optimizer.warmup_steps}",
                remedy=f"a run of {self.train.steps} steps would never reach its learning rate: "
                f"try optimizer.warmup_steps={max(1, self.train.steps // 10)}",
            )
        if model.max_timestep is not None and model.max_timestep < self.loader.context_length:
            raise InputError(
                "RECIPE_VALUE",
                f"model.max_timestep must be at least loader.context_length "
                f"({self.loader.context_length}), got {model.max_timestep}",
                remedy="raise it to the longest episode, or null for that of the data",
            )
        if self.evaluate.targets is not None and not self.evaluate.targets:
            raise InputError(
                "RECIPE_VALUE",
                "evaluate.targets must name at least one return, got an empty list",
                remedy="null takes targets from the data; evaluate.episodes: 0 turns it off",
            )
        if self.data.source is not None and self.data.collect is not None:
            raise InputError(
                "RECIPE_VALUE", "data.source and data.collect exclude each other", remedy="keep one"
            )
        if (self.data.source or self.data.collect) and self.data.path is None:
            raise InputError(
                "RECIPE_VALUE",
                "data.path is null, so there is no place for what data.source or data.collect give",
                remedy="set data.path to the directory that receives the shards",
            )
        return self

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Build a recipe from nested mappings.

        Raises
        ------
        InputError
            ``RECIPE_UNKNOWN_KEY``, ``RECIPE_MISSING``, ``RECIPE_TYPE`` or ``RECIPE_VALUE``.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise to_input_error(cls, error, where=where) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dicts and lists, every option present."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back equal."""
        return dump_yaml(self.to_dict())

    def replace(self, **options: Any) -> Recipe:
        """Return a copy with options changed, dots written as two underscores.

        ``recipe.replace(train__steps=10)`` sets ``train.steps``.
        """
        changed = self.to_dict()
        for key, value in options.items():
            *sections, leaf = key.split("__")
            place = changed
            for section in sections:
                place = place[section]
            place[leaf] = value
        return Recipe.parse(changed)


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or from a file, apply its bases, then ``key=value`` overrides.

    Parameters
    ----------
    name_or_path
        Name of a recipe that comes with gear-offline, a YAML file, or a run directory (its
        ``recipe.yaml``).
    overrides
        Dotted options and YAML values, e.g. ``"train.steps=3000"``,
        ``"evaluate.targets=[3600, 1800]"``.

    Raises
    ------
    InputError
        ``RECIPE_*``, naming the file and the dotted option.
    """
    merged, where = read_merged(name_or_path, overrides)
    return Recipe.parse(merged, where=where)


def validate_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Check everything of a recipe that can be checked without its data, and return it.

    Beyond `load_recipe` this asks whether what it names exists: the selection strategy and its
    options, environments, the policy and quality of collected data, reference scores.

    Raises
    ------
    InputError
        ``RECIPE_*`` and those of `gear_offline.recipe_checks.check_recipe`.
    """
    from gear_offline.recipe_checks import check_recipe

    recipe = load_recipe(name_or_path, overrides)
    check_recipe(recipe, where=str(name_or_path))
    return recipe
