"""The sections of a recipe: every option, its type, its default and a line about it.

Defaults are the values of the Decision Transformer paper's locomotion experiments (Chen et al.
2021, arXiv:2106.01345, and its public code).  A section checks itself; what several must agree on
is checked in `gear_offline.config.recipe`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)

from gear_offline.config.strict_yaml import byte_count, parse_yaml, whole_number
from gear_offline.core.address import hide_secrets, is_remote, parse_address
from gear_offline.core.parts import part_name
from gear_offline.core.text import count_text
from gear_offline.errors import InputError, in_home

LARGEST_TARGET = 1e18  # squares of returns-to-go stay finite in float32


def target_list(value: Any) -> Any:
    """Return asked returns as a list, also of a single number; refuse what no model can read."""
    values = [value] if type(value) in (int, float) else value
    if isinstance(values, list | tuple):
        numbers = [each for each in values if type(each) in (int, float)]
        if not values or not all(abs(each) < LARGEST_TARGET for each in numbers):
            most = f"{LARGEST_TARGET:g}"
            raise ValueError(f"give at least one return, each below {most} in size, got {values}")
        if len(set(numbers)) < len(numbers):  # every target plays the same episodes
            raise ValueError(f"names a return twice, got {values}: evaluate.episodes asks for more")
    return values


def asked_returns(targets: Any) -> tuple[float, ...]:
    """Return one or many `targets` as numbers, checked as those of a recipe (``USAGE``)."""
    try:
        if isinstance(targets, str):
            raise TypeError("they are a text")
        values = targets
        if getattr(values, "ndim", None) == 0 or not hasattr(values, "__iter__"):
            values = [values]
        return tuple(target_list([float(target) for target in values]))
    except (TypeError, ValueError) as error:
        problem, remedy = f"target returns {targets!r}: {error}", "give --targets 3600,1800"
        raise InputError("USAGE", problem, where="evaluate.targets", remedy=remedy) from error


def from_text(value: Any) -> Any:
    """Return the list that the text ``a,b`` stands for; anything else as it is."""
    return parse_yaml(f"[{value}]", where=value) if isinstance(value, str) else value


def share_of(value: Any) -> Any:
    """Return a share above 0 and below 1, given as 0.1 or ``10%``."""
    share = value
    if isinstance(value, str):
        with suppress(ValueError):
            share = float(value.strip().removesuffix("%")) / (100 if "%" in value else 1)
    if type(share) not in (int, float) or not 0.0 < share < 1.0:
        raise ValueError(f"a share is like 10% or 0.1, got {value!r}")
    return share


def user_path(value: Any) -> Any:
    """Return a path, or the name of a source, with ``~`` as the home."""
    return in_home(value) if isinstance(value, str) else value


Listed = BeforeValidator(from_text)
Whole = Annotated[int, BeforeValidator(whole_number)]  # 100000, 1e5 or 100_000
Positive = Annotated[Whole, Field(ge=1, lt=1 << 62)]
Size = Annotated[Positive, BeforeValidator(byte_count)]  # bytes; 256MiB
Count = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Place = Annotated[Text, BeforeValidator(user_path)]  # a path, hub:, d4rl: ...
Part = Annotated[Text, BeforeValidator(part_name)]  # a name, FILE.py:Name, package.module:Name
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Mode = Literal["auto", "on", "off"]
Placement = Literal["auto", "hbm", "peer", "host", "disk"]
Sharding = Literal["auto", "replicate", "shard"]
Road = Literal["auto", "peer", "nccl", "rdma", "gloo"]
Condition = Literal["return", "advantage"]
Target = Condition | Literal["nothing"]  # what a policy is asked for; goals are said apart
Span = Literal["episode", "history"]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Range = Annotated[tuple[Count, Count], Field(strict=False)]
Columns = Annotated[tuple[Text, ...], Field(min_length=1, strict=False), Listed]
Targets = Annotated[
    Annotated[tuple[float, ...], Field(strict=False)] | None, BeforeValidator(target_list), Listed
]
Names = Annotated[tuple[Text, ...], Field(strict=False), Listed]
Parts = Annotated[tuple[Part, ...], Field(strict=False), Listed]
Pair = Annotated[tuple[float, float], Field(strict=False), Listed]
EnvironmentOptions = dict[str, JsonValue]


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

    def __setattr__(self, name: str, value: Any) -> None:
        problem = f"recipes do not change: {name} cannot be set"
        raise InputError(
            "RECIPE", problem, remedy='recipe.replace({"train.steps": 5}) gives another'
        )


class CollectSettings(Section):
    """Data made on the spot when `data.path` does not exist yet."""

    environment: Part
    """Gymnasium id, e.g. Pendulum-v1, or FILE.py:Name."""
    environment_options: EnvironmentOptions = {}
    """Its arguments, as evaluate.environment_options."""
    policy: Text = "random"
    """Policy that acts, as `gear-offline collect --policy` takes it."""
    quality: Text | None = None
    """With policy ars: expert, medium, replay, medium-expert or mixed."""
    steps: Positive = 10_000
    """Steps to record; the last episode is recorded to its end."""
    action_noise: NotNegative = 0.0
    """Gaussian noise on the policy's actions, in half ranges; of discrete ones, share of random."""
    train_steps: Positive | None = None
    """Steps of making the policy; an iteration of ARS is finished; null: the maker's own limit."""
    gate: float | None = None
    """Least mean return the best policy must have recorded; else nothing is written."""
    histories: Positive | None = None
    """With policy ars or q_learning: learners whose training is recorded, each a history."""
    seed: Seed = 0
    """Seed of the environments and of the policy's making."""


def selection_options(text: str) -> str:
    """Return a recipe's options for ``NAME:OPTION=VALUE,...``, as `--strategies` takes it."""
    name, _, options = text.partition(":")
    words = (f"selection.{option}" for option in options.split(",") if option)
    return " ".join([f"selection.strategy={name}", *words])


def _name_functions(value: Any) -> Any:
    """Return options with the names of functions in place of these."""
    if isinstance(value, Mapping):
        return {key: _name_functions(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_name_functions(item) for item in value]
    return part_name(value) if callable(value) else value


class SelectionSettings(Section):
    """The choice of a batch's segments."""

    model_config = ConfigDict(extra="allow")

    strategy: Part = "uniform_steps"
    """Name of a selection strategy, whose own options stand next to it, or FILE.py:Name."""

    @field_validator("strategy", mode="before")
    @classmethod
    def _check_strategy(cls, strategy: Any) -> Any:
        if isinstance(strategy, str) and "=" in strategy.partition(":")[2]:
            raise ValueError(f"its options stand beside it: {selection_options(strategy)}")
        return strategy

    @model_validator(mode="before")
    @classmethod
    def _name_functions(cls, selection: Any) -> Any:
        return _name_functions({"strategy": selection} if callable(selection) else selection)

    @property
    def options(self) -> dict[str, Any]:
        """The strategy's own options, which it checks itself."""
        return dict(self.model_extra or {})


class PlaySettings(Section):
    """Options of an evaluation that each of several tasks has for itself."""

    environment: Part | None = None
    """Gymnasium id, or FILE.py:Name; null: the one that the dataset names, if it names one."""
    environment_options: EnvironmentOptions | None = None
    """Arguments of gymnasium.make, such as {g: 1.0, max_episode_steps: 40}; null: the data's."""
    reference: Text | Pair | None = None
    """D4RL name, or two returns, that stand for 0 and 100; null: the data's, if played there."""
    targets: Targets = None
    """Returns as the data count them; null: their best and mean.  Of goals: numbers of tasks."""


class FallbackSettings(PlaySettings):
    """Data that a base makes, and their evaluation, where a recipe names other data."""

    source: Place | None = None
    """Source to convert."""
    reader: Part | None = None
    """Reader of the source."""
    collect: CollectSettings | None = None
    """Data to record and convert."""


class StoredSettings(Section):
    """A dataset, and what it is made of; each of several tasks has its own."""

    path: Place | None = None
    """Directory of GEAR shards, relative to the current directory; hub:USER/NAME; an address."""
    source: Place | None = None
    """Source to convert into `path` if that does not exist: file, address, d4rl:, minari:, hub:."""
    reader: Part | None = None
    """Function that yields the episodes of a source of one's own format, FILE.py:read_log."""
    collect: CollectSettings | None = None
    """Data to record and convert into `path` if that does not exist, instead of `source`."""
    admissions: Positive | None = None
    """Pieces that were admitted to `path`, the first so many; null: all when the run begins."""
    cache: Size | None = None
    """Bytes of this disk for an address in `path`, read by ranges; 20GB; null: fetched whole."""
    fallback: FallbackSettings | None = None
    """A base's own data and evaluation, in whose place `path` is named: if missing or made so."""

    @property
    def maker(self) -> StoredSettings | FallbackSettings:
        """The options that make `path` where it is missing."""
        return self if self.source or self.collect else self.fallback or self

    @model_validator(mode="after")
    def _check_maker(self) -> Self:
        if self.source is not None and self.collect is not None:
            raise ValueError("source and collect exclude each other: keep one")
        if self.reader is not None and self.source is None:
            raise ValueError("reader needs source, which it reads")
        if self.cache is not None and parse_address(self.path) is None:
            raise ValueError("cache is for a path at an address, as s3://bucket/mine")
        if any(text and hide_secrets(text) != text for text in (self.path, self.source)):
            problem = "an address in a recipe, which runs and trackers keep, holds no user or query"
            raise ValueError(f"{problem}: convert it first, or log in as its package asks for")
        return self


class TaskSettings(StoredSettings, PlaySettings):
    """One of several tasks: its data, its share of the batches, its evaluation."""

    path: Place
    """Directory of GEAR shards, as data.path."""
    weight: NotNegative = 1.0
    """Share of the segments, in proportion to the other tasks' weights."""
    returns_scale: PositiveFloat | None = None
    """Its returns-to-go are divided by this; null: loader.returns_scale."""
    selection: SelectionSettings | None = None
    """Selection of its segments; null: as the recipe's selection."""


class SchedulePoint(Section):
    """Weights of the tasks at a step; between two points they change linearly."""

    step: Count
    """Step of the training."""
    weights: dict[Name, NotNegative]
    """A weight for every task."""


def without_nulls(value: Any) -> Any:
    """Leave out the tasks of a base that a recipe sets to null."""
    if not isinstance(value, dict):
        return value
    return {name: task for name, task in value.items() if task is not None}


Tasks = Annotated[dict[Name, TaskSettings], Field(min_length=1), BeforeValidator(without_nulls)]


class LimiterSettings(Section):
    """Limits of the draws for each episode that comes, as Reverb's rate limiters."""

    min_size: Positive | None = None
    """Episodes that are there before any is drawn; null: as many as at first."""
    samples_per_insert: PositiveFloat | None = None
    """Segments that are drawn for each episode that is inserted."""
    error_buffer: PositiveFloat | Pair | None = None
    """Segments that may be drawn too few or too many; or the least and most of
    inserts * samples_per_insert - draws."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.samples_per_insert is None) != (self.error_buffer is None):
            raise ValueError("samples_per_insert and error_buffer need each other")
        return self

    def error_bounds(self, least: int) -> tuple[float, float]:
        """Return the least and most of that error; of one number it counts from `least` inserts."""
        if isinstance(self.error_buffer, tuple):
            return self.error_buffer
        middle, buffer = least * (self.samples_per_insert or 0.0), self.error_buffer or math.inf
        return middle - buffer, middle + buffer


Remover = Literal["fifo", "lifo", "uniform", "prioritized", "max_heap", "min_heap"]


class DataSettings(StoredSettings):
    """The source of the steps."""

    columns: Columns | None = None
    """Columns to convert; null: all."""
    histories: Text | None = None
    """Column that numbers the histories of episodes; null: what the source says, or none."""
    tasks: Tasks | None = None
    """In place of path, source and collect: several tasks by name, for one model."""
    schedule: Annotated[tuple[SchedulePoint, ...], Field(min_length=1, strict=False)] | None = None
    """In place of the tasks' weights: weights that change over the steps."""
    held_out: Annotated[float, BeforeValidator(share_of)] | None = None
    """Share of the episodes, 10% or 0.1, that nothing is learnt from; validation/loss is theirs."""
    held_out_by: Text | None = None
    """Column that stays in an episode: those of one value stay together; null: each by itself."""
    admit_every: Positive | None = None
    """Steps between two looks at what actors have appended to `path`; null: it does not grow."""
    actors: Positive | None = None
    """Environments of the run's device that it plays an episode in before each look; null: none."""
    max_size: Positive | None = None
    """Episodes to draw from at most: beyond it, each that is admitted removes one."""
    remover: Remover = "fifo"
    """The one that is removed: oldest, newest, any, by priority, of highest or lowest priority."""
    priority: Text | None = None
    """Column whose value at an episode's first step is its priority; null: its return."""
    max_times_sampled: Positive | None = None
    """Draws after which an episode is removed."""
    limiter: LimiterSettings | None = None
    """Limits that each look keeps; it waits for episodes for nine tenths of train.timeout."""
    replay: bool = False
    """Admit what was admitted before, at the same steps, and nothing new."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        single = [name for name in ("path", "source", "collect") if getattr(self, name) is not None]
        if self.held_out_by is not None and self.held_out is None:
            raise ValueError("held_out_by needs held_out, such as 10%")
        growing = ("replay", "actors", "max_size", "max_times_sampled", "limiter")
        if self.admit_every is None and any(getattr(self, name) for name in growing):
            raise ValueError(f"{', '.join(growing)} need admit_every")
        if self.limiter and (self.limiter.min_size or 1) > (self.max_size or math.inf):
            raise ValueError("limiter.min_size is above max_size")
        if self.admit_every is not None and self.admissions is not None:
            raise ValueError("admit_every and admissions exclude each other: keep one")
        if self.admit_every is not None and self.path is None:
            raise ValueError("admit_every needs path: data of several tasks do not grow")
        if self.admit_every is not None and not self.replay and is_remote(self.path):
            raise ValueError("admit_every needs a path of this machine, not of a server")
        if self.tasks is None:
            if single and self.path is None:
                raise ValueError(f"path is null, so there is no place for what {single[0]} gives")
            if self.schedule is not None:
                raise ValueError("schedule needs tasks")
            return self
        if single:
            problem = f"write data.tasks.NAME.{single[0]}"
            raise ValueError(f"{single[0]} and tasks exclude each other: {problem}")
        steps = [point.step for point in self.schedule or ()]
        if steps != sorted(set(steps)):
            raise ValueError(f"the steps of schedule must rise, got {steps}")
        for number, point in enumerate(self.schedule or ()):
            if set(point.weights) != set(self.tasks) or not any(point.weights.values()):
                every = f"every task once ({', '.join(self.tasks)}), and not be all zero"
                raise ValueError(f"schedule.{number}.weights must name {every}")
        if self.schedule is None and not any(task.weight for task in self.tasks.values()):
            raise ValueError("the weights of the tasks are all zero: give one a positive weight")
        return self


class GoalSettings(Section):
    """Shares of the kinds of goal, in proportion; seen from the last step of its window."""

    kind: Part | None = None
    """Law of one's own in place of the shares, FILE.py:Name."""
    current: NotNegative = 0.0
    """That step's own state."""
    future: NotNegative = 0.0
    """A later state of the episode, the last one where there is none."""
    final: NotNegative = 0.0
    """The episode's last state."""
    random: NotNegative = 0.0
    """Any state of the episodes that the selection draws from."""
    discount: Fraction | None = None
    """Law of future: k steps ahead, geometric, all beyond is the last; null: any alike."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares = self.current + self.future + self.final + self.random
        if self.kind is not None and (shares > 0 or self.discount is not None):
            raise ValueError("kind draws all goals: leave out shares and discount, or kind=null")
        if self.kind is None and not shares > 0:
            raise ValueError("current, future, final and random must not be all 0")
        return self


class LoaderSettings(Section):
    """The makeup of a batch."""

    batch_size: Positive = 64
    """Segments in a batch (B)."""
    context_length: Annotated[Whole, Field(ge=1, le=65_536)] = 20
    """Steps in a segment (K)."""
    observations: Columns = ("observations",)
    """Columns that make up an observation, frames and vectors: [camera, state]."""
    frame_stack: Annotated[int, Field(ge=1, le=64)] = 1
    """Frames of each column of single frames that make up a state."""
    extra_columns: Names = ()
    """Further columns in batch.extras; next_states, terminated and has_next are computed."""
    span: Span = "episode"
    """The end of a segment: its episode's; history: that of the episodes that go on behind it."""
    padding: Literal["right", "left"] = "right"
    """Side on which segments shorter than K are filled up."""
    condition: Condition = "return"
    """What a policy is asked for: a return-to-go; advantage: each step's own, of that column."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount of the returns-to-go, and of what is asked while playing."""
    returns_scale: PositiveFloat = 1000.0
    """Returns-to-go are divided by this; a recipe's advantages always by their deviation."""
    normalize_states: bool = True
    """Subtract the dataset's mean from the observations and divide by its deviation."""
    goals: GoalSettings | None = None
    """States by hindsight that the model is asked to reach, in place of returns."""
    chunk: Annotated[Whole, Field(ge=1, le=65_536)] | None = None
    """Next actions (C), from a segment's last step on, that a model of one's own predicts."""
    engine: Mode = "auto"
    """On CUDA: select and gather on the GPU; auto: where that is possible."""
    placement: Placement = "auto"
    """Rows in GPU memory, over the node's GPUs, in host memory or on disk; auto: as they fit."""
    hbm_budget: Size | None = None
    """Bytes of GPU memory that rows may take; null: 60 % of what is free."""
    host_budget: Size | None = None
    """For auto and disk, bytes of host memory for rows; null: half of it if on disk, else all."""
    sharding: Sharding = "auto"
    """With several nodes: each holds all, or its shards; auto: its shards where all do not fit."""
    exchange: Road = "auto"
    """Rows of other nodes: read in their GPUs, by NCCL, RDMA, gloo; auto: the first that works."""

    @model_validator(mode="after")
    def _check_condition(self) -> Self:
        if self.condition == "advantage" and (self.gamma != 1.0 or self.goals is not None):
            other = "goals" if self.goals is not None else f"gamma={self.gamma:g}, of returns,"
            raise ValueError(f"condition=advantage and {other} exclude each other: keep one")
        if self.span == "history":
            for is_given, other, reason in (
                (self.goals is not None, "goals", "goals are states of one episode"),
                (self.frame_stack > 1, f"frame_stack={self.frame_stack}", "frames would be of two"),
                (self.sharding == "shard", "sharding=shard", "nodes would have parts of one"),
            ):
                if is_given:
                    raise ValueError(f"span=history and {other} exclude each other: {reason}")
        return self


RELEASED = "transformers.DecisionTransformerModel"  # the kind of Hugging Face's class as it is


class ModelSettings(Section):
    """The model and its own options; a base for the options of other models."""

    kind: Part = "decision_transformer"
    """The model: a kind that has its own options here, or FILE.py:Name."""
    max_timestep: Positive | None = None
    """Longest episode the model can place; null: the longest of the data and the environment."""

    asks_returns: ClassVar[Any] = False  # it cannot do without returns-to-go
    is_stochastic: ClassVar[Any] = False  # its actions can be drawn
    takes_tasks: ClassVar[Any] = False  # it can be trained on data of several tasks
    stacks: ClassVar[Any] = False  # several runs can be trained as one
    takes_chunks: ClassVar[Any] = False  # its losses are of chunks of actions
    # blocks, their width, tokens of a step: what memory and FLOPs follow from; 0: unknown
    shape: ClassVar[Any] = (0, 0, 0)

    def __str__(self) -> str:
        return self.kind


class TransformerSettings(ModelSettings):
    """Size and shape of the Decision Transformer."""

    hidden_size: Positive = 128
    """Width of the embeddings; a multiple of `heads`."""
    layers: Annotated[Whole, Field(ge=1, le=10_000)] = 3
    """Transformer blocks."""
    heads: Positive = 1
    """Attention heads of a block."""
    activation: Literal["relu", "gelu", "silu", "tanh", "gelu_new"] = "relu"
    """Activation of the feed-forward part."""
    dropout: Fraction = 0.1
    """Probability of dropout, in residuals, embeddings and attention."""
    max_timestep: Positive | None = 1000
    """Longest episode the model can place; null: the longest of the data and the environment."""
    action_tanh: bool | Literal["auto"] = True
    """Squash predicted actions into [-1, 1]; auto: where the data lie in it."""
    policy: Literal["deterministic", "gaussian"] = "deterministic"
    """gaussian: a stochastic one that explores, as of the Online Decision Transformer."""
    condition: Literal["returns", "rewards"] = "returns"
    """First token of a step: its return-to-go; rewards: the last reward, and nothing is asked."""
    position: Literal["none", "rotary"] = "none"
    """Place in the window, besides the timestep: rotary: what lies between two tokens counts."""
    encoder: Literal["auto", "none", "cnn", "patch"] = "auto"
    """Encoder of frames: the DQN's convolutions, or linear maps of patches; auto: cnn."""

    @model_validator(mode="before")
    @classmethod
    def _drop_attention(cls, options: Any) -> Any:
        """Read runs of a time when `attention` could name what is done now, or ``eager``."""
        if not isinstance(options, dict) or "attention" not in options:
            return options
        if options["attention"] not in ("auto", "sdpa"):
            raise ValueError("attention is no option any more, it is always fused: leave it out")
        return {name: value for name, value in options.items() if name != "attention"}

    asks_returns = property(lambda self: self.condition == "returns")
    is_stochastic = property(lambda self: self.policy == "gaussian")
    takes_tasks = property(lambda self: not self.is_stochastic)
    stacks: ClassVar[Any] = True
    shape = property(lambda self: (self.layers, self.hidden_size, 3))

    def __str__(self) -> str:
        return f"{self.hidden_size} wide, {count_text(self.layers, 'layer')}"


class DecoupledSettings(TransformerSettings):
    """The Decision Transformer's, for two tokens a step."""

    kind: Part = "decoupled"
    """The Decision Transformer of two tokens a step, the return behind the blocks."""
    max_timestep: Positive | None = None
    """Longest episode the model can place; null: the longest of the data and the environment."""
    action_tanh: bool | Literal["auto"] = "auto"
    """Squash predicted actions into [-1, 1]; auto: where the data lie in it."""

    takes_tasks: ClassVar[Any] = False
    stacks: ClassVar[Any] = False
    shape = property(lambda self: (self.layers, self.hidden_size, 2))


class ReleasedSettings(TransformerSettings):
    """The Decision Transformer's, for the class of Hugging Face as it is."""

    kind: Part = RELEASED
    """Hugging Face's class as it is."""

    takes_tasks: ClassVar[Any] = False
    stacks: ClassVar[Any] = False


class MLPSettings(ModelSettings):
    """Size and condition of a multilayer perceptron."""

    kind: Part = "mlp"
    """Cloning by a multilayer perceptron."""
    condition: Literal["nothing", "returns", "goals"] = "nothing"
    """Cloning of what the data do (BC), or also of returns-to-go (RvS) or goals (GCBC)."""
    history: Positive = 1
    """Steps whose states it sees, at most loader.context_length."""
    hidden_size: Positive = 256
    """Width of the layers."""
    layers: Annotated[Whole, Field(ge=1, le=1000)] = 2
    """Hidden layers."""
    activation: Literal["relu", "gelu", "silu", "tanh", "gelu_new"] = "relu"
    """Activation between the layers; gelu_new: by the tangent, as JAX has it."""
    initialization: Literal["torch", "glorot"] = "torch"
    """First weights; glorot: uniform ones, the last layer's a tenth, as OGBench's actors have."""
    dropout: Fraction = 0.1
    """Probability of dropout behind each layer."""
    action_tanh: bool | Literal["auto"] = "auto"
    """Squash predicted actions into [-1, 1]; auto: where the data lie in it."""

    asks_returns = property(lambda self: self.condition == "returns")
    stacks: ClassVar[Any] = True
    shape = property(lambda self: (self.layers, self.hidden_size, 1))


class IQLSettings(ModelSettings):
    """Sizes and constants of implicit Q-learning; the paper's for locomotion."""

    kind: Part = "iql"
    """Implicit Q-learning."""
    expectile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """Expectile of the critics that the value is; 0.5 is their mean."""
    temperature: NotNegative = 3.0
    """Factor of the advantage in the weight of an action; 0 is cloning."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.99
    """Discount of the values; loader.gamma is of the returns-to-go."""
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share of the critics that their slow copies take over each step."""
    reward_scale: PositiveFloat | Literal["auto"] = "auto"
    """Rewards are divided by it; auto: best less worst return of the data, over 1000."""
    policy: Literal["gaussian", "deterministic"] = "gaussian"
    """gaussian: a likelihood with one deviation an action element; deterministic: squared error."""
    policy_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Of the policy, in place of optimizer.schedule, which values and critics have."""
    hidden_size: Positive = 256
    """Width of the layers."""
    layers: Annotated[Whole, Field(ge=1, le=1000)] = 2
    """Hidden layers of each network."""
    action_tanh: bool | Literal["auto"] = "auto"
    """Squash the policy's means into [-1, 1]; auto: where the data lie in it."""

    is_stochastic = property(lambda self: self.policy == "gaussian")
    stacks: ClassVar[Any] = True
    shape = property(lambda self: (self.layers, self.hidden_size, 1))


class OwnModelSettings(ModelSettings):
    """The options of a model that comes from elsewhere, which checks them itself."""

    asks_returns: ClassVar[Any] = None  # unknown
    takes_chunks: ClassVar[Any] = None  # the trial finds out
    model_config = ConfigDict(extra="allow")


MODEL_KINDS: dict[str, tuple[type[ModelSettings], str]] = {  # options, class in the room models
    "decision_transformer": (TransformerSettings, "decision_transformer:DecisionTransformer"),
    "decoupled": (DecoupledSettings, "decoupled:Decoupled"),
    "mlp": (MLPSettings, "mlp:MLP"),
    "iql": (IQLSettings, "iql:IQL"),
    RELEASED: (ReleasedSettings, "hugging_face:Released"),
}


def option_names(settings: Any) -> list[str]:
    """Return the names of the options of a model, whose class pydantic can check."""
    names = getattr(settings, "model_fields", None) or settings.__dataclass_fields__
    return list(names)


def _model_tag(value: Any) -> str:
    model_kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    model_kind = "decision_transformer" if model_kind is None else str(model_kind)
    return model_kind if model_kind in MODEL_KINDS else OWN_MODEL


OWN_MODEL = "own"
if TYPE_CHECKING:
    Model = Any  # each kind has options of its own
else:
    tagged = [Annotated[each, Tag(name)] for name, (each, _) in MODEL_KINDS.items()]
    tagged.append(Annotated[OwnModelSettings, Tag(OWN_MODEL)])
    Model = Annotated[reduce(or_, tagged), Discriminator(_model_tag)]


class OptimizerSettings(Section):
    """AdamW with gradient clipping and a linear warm-up."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate after the warm-up."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay of all parameters."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False), Listed] = (0.9, 0.999)
    """Averaging factors of the first and second moment."""
    clip_norm: PositiveFloat | None = 0.25
    """Largest norm of the gradient; null: no clipping."""
    warmup_steps: Count | Literal["auto"] = "auto"
    """Steps over which the learning rate rises; auto: a tenth of train.steps, at most 10,000."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at train.steps."""

    def warmup(self, steps: int) -> int:
        """Return the warm-up of a run of so many steps."""
        return min(10_000, steps // 10) if self.warmup_steps == "auto" else self.warmup_steps


class TrainSettings(Section):
    """Length of training, device, and intervals of logs, checkpoints and evaluations."""

    steps: Positive = 100_000
    """Optimiser steps."""
    init: Place | None = None
    """Run, checkpoint or policy folder whose weights, normalisation and returns_scale it takes."""
    skip: Annotated[tuple[Range, ...], Field(strict=False)] = ()
    """Ranges of batches to leave out, both ends included: [[4100, 4160]]; later ones follow."""
    device: Device = "auto"
    """auto: CUDA where there is one, else the CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """auto: bfloat16 autocast on CUDA devices that have it, float32 elsewhere; fp8: the blocks'
    linear maps in 8 bits where the GPU can, all else as with auto."""
    graph: Mode = "auto"
    """On CUDA: the whole step as one CUDA graph; auto: where possible."""
    compile: Mode = "auto"
    """On CUDA: torch.compile; auto: for runs of 20,000 steps or more."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Weights, gradients and residuals that a step computes with; updates are float32 always."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """With several ranks: a replica of the model on each, or shards; auto: replicas if they fit."""
    reshard: Mode = "auto"
    """Shards: free a block's weights between its passes; auto: where all of them do not fit."""
    accumulate: Positive = 1
    """Micro-batches that a rank's share of a batch is cut into, to save memory."""
    recompute: bool = False
    """Compute blocks again in the backward pass instead of keeping what is in them."""
    threads: Annotated[Whole, Field(ge=1, le=4096)] | None = None
    """CPU threads of torch; null: OMP_NUM_THREADS, else up to 8 cores, 1 for small models."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for other processes; an evaluation of the first one must fit in."""
    log_every: Annotated[Whole, Field(ge=1, le=1_000_000)] = 100
    """Steps between two lines of metrics.jsonl."""
    checkpoint_every: Positive = 10_000
    """Steps between two checkpoints; each evaluation saves one too."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints that are kept; the best one stays too."""
    best: Literal["auto", "return", "validation/loss"] = "auto"
    """Measure of the best checkpoint; auto: return, but validation/loss where nothing is played."""
    validation_batches: Positive = 64
    """Batches of held-out windows, at most, that each validation/loss is of; always the same."""
    evaluate_every: Positive | None = 10_000
    """Steps between two evaluations; null: at the end only."""
    deterministic: Literal[False, True, "ranks"] = False
    """Only kernels that give the same bits each time: resumed runs end in the same weights; ranks:
    also on another number of processes, by sums over fixed pieces of a batch in one order."""
    trackers: Parts = ("tensorboard",)
    """Trackers that show metrics too: tensorboard, csv, trackio, mlflow, wandb, FILE.py:Name."""
    callbacks: Parts = ()
    """Classes derived from gear_offline.Callback, FILE.py:Name: told of each event of the run."""
    project: Name = "gear-offline"
    """Project that trackio, mlflow and wandb show the run in."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        edges = [edge for first, last in self.skip for edge in (first, last + 1)]
        if edges != sorted(set(edges)):  # ranges that touch are one
            raise ValueError(f"skip must be rising ranges with batches between, got {self.skip}")
        return self

    def batch_of(self, step: int) -> int:
        """Return the batch that the optimiser step takes, both counted from 0.

        It is `step` itself until something is skipped; what is left out moves the rest up.
        """
        for first, last in self.skip:
            step += last + 1 - first if step >= first else 0
        return step


class EvaluateSettings(PlaySettings):
    """Rollouts of the policy that was learnt."""

    episodes: Count = 100
    """Episodes for each target; 0: no evaluation while training."""
    episodes_of_memory: Positive = 1
    """Episodes that follow each of them in its environment, the first included, in one memory."""
    sample: bool = False
    """Draw actions, discrete ones by their probabilities; else the means, or the most probable."""
    offline: bool = False
    """Judge the policy by its data when training ends, as gear-offline choose does."""
    environments: Positive | Literal["auto"] = "auto"
    """Environments that step together for each target; auto: 20 on the CPU, up to 256 on a GPU."""
    seed: Count = 1000
    """Seed of the first evaluation environment."""
    background: Mode = "auto"
    """Evaluate in other processes while training goes on; auto: where that saves time."""
    device: Device = "auto"
    """Device of the policy; auto: that of training."""
    workers: Positive | None = None
    """Processes of evaluation in the background on the CPU; null: by the cores training leaves."""
