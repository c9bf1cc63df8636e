"""The interface of models: all that training, evaluation, policy folders and exports know of one.

A model is a class derived from `SequenceModel`, named by ``model.kind``.  The least it has is
`predict`; a loss of its own is `losses`, another way to act is `act`.

Shape legend: B windows, K steps, S state elements, A action elements or discrete actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gear_offline.batches.tables.fields import Scales
from gear_offline.config.problems import nearest, problem_text
from gear_offline.config.sections import (
    ModelSettings,
    OptimizerSettings,
    OwnModelSettings,
    option_names,
)
from gear_offline.core.parts import (
    calling_part,
    digest_of,
    find_part,
    is_part,
    part_error,
    part_name,
)
from gear_offline.errors import GearError, InputError, is_out_of_memory
from gear_offline.models.eight_bit import MULTIPLE, EightBitLinear
from gear_offline.models.encoders import COLUMN_KEYS, InputColumn, Size, column_facts
from gear_offline.models.kinds import MODELS as MODELS
from gear_offline.models.loss import Padding, TrainingBatch, mean_loss, step_losses

COMPILERS = ("torch._dynamo", "torch._inductor")  # where errors of torch.compile are


class ModelTask(Scales):
    """A task of a model, named as in the recipe; part of the model's configuration."""

    name: str
    state_dim: Annotated[int, Field(ge=1)]
    action_dim: Annotated[int, Field(ge=1)]  # or how many discrete actions it has
    return_worst: float = 0.0  # of the episodes it was learnt from
    return_best: float = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.state_mean is not None and len(self.state_mean) != self.state_dim:
            raise ValueError("state_mean and state_std are not of its states")
        return self


class ModelSizes(BaseModel):
    """Sizes of states and actions that a model needs; of several tasks the widest."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())
    state_dim: Size  # S, numbers in an observation
    action_dim: Size  # A, or the number of discrete actions
    discrete: bool = False
    # of an observation: several by their names, or one, by default a vector, that needs none
    columns: Annotated[tuple[InputColumn, ...], Field(strict=False)] = ()
    tasks: Annotated[tuple[ModelTask, ...], Field(strict=False)] = ()  # of data of several

    @model_validator(mode="before")
    @classmethod
    def _take_columns(cls, values: Any) -> Any:
        facts = {name: value for name, value in values.items() if name not in COLUMN_KEYS}
        return facts | {"columns": column_facts(values)}

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        column = self.columns[0]
        if len(self.columns) == 1 and column.size != self.state_dim:
            raise ValueError(f"{column.text} do not make a state of {self.state_dim}")
        return self


class ModelFacts(ModelSizes):
    """The sizes of the data and windows that a model is made for."""

    context_length: Annotated[int, Field(ge=1, le=65_536)] = 20  # K
    max_timestep: Size = 1000  # every timestep is smaller
    goals: bool = False  # windows have goals, states to reach, in place of returns
    chunk: Annotated[int, Field(ge=1, le=65_536)] | None = None  # next actions of a batch, C

    @property
    def sizes(self) -> ModelSizes:
        """Those of the data, which know neither stacks nor encoders; of one task."""
        plain = {"stack": 1, "encoder": "none"}
        return ModelSizes(
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            discrete=self.discrete,
            columns=tuple(column.model_copy(update=plain) for column in self.columns),
        )

    @property
    def state_width(self) -> int:
        """Numbers in a state."""
        return sum(prod(column.state_shape) for column in self.columns)

    def states(self, rows: Tensor) -> Any:
        """Return rows (..., state_width) as the states of a batch; of several columns a dict."""
        states, columns = dict[str, Tensor](), self.columns
        pieces = torch.split(rows, [prod(column.state_shape) for column in columns], -1)
        for column, piece in zip(columns, pieces, strict=True):
            shape = column.shape if column.stack == 1 else column.state_shape
            state = piece.reshape(*piece.shape[:-1], *shape)
            states[column.name] = state.to(torch.uint8) if column.frames == "uint8" else state
        return states if len(columns) > 1 else states[columns[0].name]


@dataclass(frozen=True, eq=False)
class PlayedWindow:
    """The steps so far of B environments that act: what `act` sees.

    Fields are named as in `gear_offline.Batch`.  Real steps come first; the newest is at `place`,
    whose action, which is not chosen yet, is 0.  There are K steps; with
    `short_windows` only as many as the longest window has.
    """

    states: Any  # (B, K, *S), of several columns a dict of them
    actions: Tensor  # (B, K, A) float32, or (B, K) int64
    returns_to_go: Tensor | None  # (B, K, 1) float32, None for models of goals
    goals: Tensor | None  # (B, K, S)
    timesteps: Tensor  # (B, K) int64
    place: Tensor  # (B,) int64
    noise: Tensor | float = 0.0  # (B, A) standard normal: draw the actions; 0: their means
    padding: Padding = "right"
    tasks: Tensor | None = None
    rewards: Tensor | None = None  # (B, K, 1) float32 as the data hold them; the newest's is 0

    @property
    def attention_mask(self) -> Tensor:
        """(B, K) int64, 1 on real steps."""
        steps = torch.arange(self.timesteps.shape[1], device=self.place.device)
        return (steps <= self.place[:, None]).long()

    def last(self, values: Tensor) -> Tensor:
        """Return those of the newest step, (B, ...), of values (B, K, ...)."""
        index = self.place.view(-1, *[1] * (values.ndim - 1))
        return values.gather(1, index.expand(-1, 1, *values.shape[2:]))[:, 0]


class SequenceModel(nn.Module):
    """A model of windows of an episode: a torch module with losses that acts.

    It is made as ``Model(facts, settings)``.  Options of its own are a `Settings` class, of which
    a recipe gives the values as ``model.NAME``.

    Attributes
    ----------
    facts
        `ModelFacts`: sizes of states, actions and windows.
    settings
        The options, an instance of `Settings`.
    Settings
        A subclass of `ModelSettings`, or another class that pydantic checks.
    short_windows
        True if `act` takes windows of fewer than K steps.
    sees_timesteps
        True if `act` depends on the window's timesteps; the trial before training finds out.
    stochastic
        True if `act` draws actions by the window's noise.
    bounded
        True if continuous actions are within [-1, 1].
    compiled
        Names of methods that are compiled besides the blocks of a deep model.
    formula
        The meaning of `flops` in words.
    uncaptured
        The reason why its steps cannot be captured as a CUDA graph, if they cannot.
    loss_names
        Names of several losses of a model of this package; the trial finds those of others.
    blocks
        Its layers in order, where there are such: compiled, sharded, recomputed one by one.

    Examples
    --------
    >>> import torch
    >>> import gear_offline as go
    >>> class Linear(go.SequenceModel):
    ...     def __init__(self, facts, settings):
    ...         super().__init__()
    ...         self.map = torch.nn.Linear(facts.state_dim, facts.action_dim)
    ...
    ...     def predict(self, batch):
    ...         return self.map(batch.states)
    >>> options = {"data.path": "tiny", "train.steps": 4, "evaluate.episodes": 0}
    >>> run = go.train("smoke", options, model=Linear, out="runs/linear", quiet=True)
    >>> run.recipe.model.kind.rpartition(":")[2]
    'Linear'
    """

    Settings: ClassVar[Any] = ModelSettings
    facts: ModelFacts
    settings: Any
    blocks: Any  # modules
    part: tuple[str, str] = ("", "")  # its name, and the digest of its file
    short_windows: bool = False
    sees_timesteps: bool = True
    stochastic: bool = False
    compiled: tuple[str, ...] = ()
    formula: str = ""
    uncaptured: str | None = None
    loss_names: tuple[str, ...] = ()

    if TYPE_CHECKING:  # modules and buffers of one's own

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, facts: ModelFacts | None = None, settings: Any = None) -> None:
        super().__init__()
        if facts is not None:
            self.facts, self.settings = facts, settings

    @classmethod
    def build(cls, facts: ModelFacts, settings: Any) -> Self:
        """Return a model of these facts and settings, on torch's default device."""
        model = cls(facts, settings)
        model.facts, model.settings = facts, settings
        return model

    def predict(self, batch: Any) -> Tensor:
        """Return the actions of each step of a batch or window: (B, K, A), logits of discrete ones.

        The action of a step is predicted from the steps before it, and its own state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `predict`")

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of each step by name, (B, K) each; their sum is trained."""
        return {"action": step_losses(self.predict(batch), batch.actions)}

    def act(self, window: PlayedWindow) -> Tensor:
        """Return an action for each window: (B, A) floating, logits of discrete ones, or (B,)."""
        return window.last(self.predict(window))

    def make_cache(self, windows: int, steps: int) -> Tensor | None:
        """Return room for what `act_next` keeps of windows of up to so many steps; None: none."""
        return None

    def act_next(self, window: PlayedWindow, cache: Tensor, steps: int) -> Tensor:
        """Do as `act` with the steps before in the cache, at a cost that does not grow with them.

        `window` has two steps, the last and the newest, whose ``place`` counts all; below `steps`.
        """
        raise NotImplementedError

    def fill_cache(self, window: PlayedWindow, cache: Tensor, rows: Tensor) -> None:
        """Make the steps of windows those that the cache has of `rows` (B,)."""
        raise NotImplementedError

    def parameter_groups(self, optimizer: OptimizerSettings) -> Sequence[Mapping[str, Any]]:
        """Return parameters that are clipped and updated by options of their own.

        Parameters
        ----------
        optimizer
            The recipe's options, which hold for the parameters of no group.

        Returns
        -------
        list of dict
            A group's parameters as ``"params"``, an iterable, and those options that differ, by
            their names in the recipe's section ``optimizer``.
        """
        return ()

    def after_step(self) -> None:
        """Run once after each update of the weights: move target networks, for example.

        Gradients are off.  In a CUDA graph it is captured with the step.
        """

    def forward(self, batch: Any) -> Any:
        """Return the losses."""
        return self.losses(batch)

    def loss(self, batch: TrainingBatch, *, valid_steps: Tensor | float | None = None) -> Tensor:
        """Return the scalar loss of a batch; `valid_steps` as in `mean_loss`."""
        if facts := getattr(self, "facts", None):
            _check_sizes(facts, getattr(batch, "states", None), batch.actions)
        return mean_loss(total_loss(self.losses(batch)), batch.attention_mask, valid_steps)

    def remember(self, states: Any) -> Tensor:
        """Encode states (B, K, *S) as the floats (B, K, any) that a policy keeps while acting."""
        if isinstance(states, Mapping):
            return torch.cat([self.remember(states[c.name]) for c in self.facts.columns], -1)
        return states.flatten(2).float()  # type: ignore[no-any-return]

    @property
    def state_width(self) -> int:
        """The last size of the features that `remember` gives."""
        return self.facts.state_width

    def recall(self, features: Tensor) -> Any:
        """Decode the features of `remember` into states as `act` takes them."""
        return self.facts.states(features)

    @property
    def bounded(self) -> bool:
        return False

    @property
    def asks_nothing(self) -> bool:
        """True of a model of this package that acts without a return, an advantage or a goal."""
        asks = getattr(getattr(self, "settings", None), "asks_returns", None)
        return asks is False and self.part[0] in MODELS.own and not self.facts.goals

    def flops(self, segments: int) -> float | None:
        """Return the FLOPs of a training step of `segments` windows; None: not known."""
        return None

    def measures(self) -> dict[str, float]:
        """Return further numbers to log."""
        return {}

    def of_task(self, name: str) -> SequenceModel:
        """Return the model of one of several tasks."""
        problem = f"{type(self).__name__} cannot be taken apart by tasks"
        raise InputError("MODEL", problem, "data.tasks", "write its method of_task(name)")

    def recompute(self) -> None:
        """Compute blocks again in the backward pass instead of keeping their activations."""
        if not blocks_of(self):
            problem = f"{type(self).__name__} names no blocks"
            remedy = "give it a property `blocks`, or use train.recompute=false"
            raise InputError("MODEL", problem, "train.recompute", remedy)
        for block in blocks_of(self):
            block.forward = _recompute_forward(block, block.forward)

    def learning(self) -> list[nn.Parameter]:
        """Freeze parameters that no loss reaches, and return the others."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def use_eight_bits(self) -> str | None:
        """Have linear maps of blocks multiply in 8 bits while training, or return why not."""
        inner = [layer for block in blocks_of(self) for layer in block.modules()]
        maps: Any = [layer for layer in inner if type(layer) is nn.Linear]
        maps = [layer for layer in maps if not any(size % MULTIPLE for size in layer.weight.shape)]
        for layer in maps:
            layer.__class__ = EightBitLinear
        what = f"no `blocks` of {type(self).__name__} have an nn.Linear of multiples of {MULTIPLE}"
        return None if maps else what

    def config_text(self) -> str:
        """Return the facts and options that the model is made again from, JSON."""
        if not hasattr(self, "facts"):
            problem = f"{type(self).__name__} does not say what it was made of"
            raise InputError("MODEL", problem, "facts", "call super().__init__(facts, settings)")
        name, digest = self.part
        name = name or part_name(type(self))
        document: dict[str, Any] = {"kind": name, "digest": digest or digest_of(name)}
        document["facts"] = self.facts.model_dump(mode="json")
        document["sees_timesteps"] = self.sees_timesteps
        return json.dumps(document | {"settings": settings_dump(self.settings)}, indent=1)


def _check_sizes(facts: ModelFacts, states: Any, actions: Tensor) -> None:
    """Refuse states and actions of other sizes than the model's."""
    sizes = {}
    if isinstance(states, Tensor) and not any(column.frames for column in facts.columns):
        sizes["states"] = (prod(states.shape[2:]), facts.state_width)
    if actions.is_floating_point() and not facts.discrete:
        sizes["actions"] = (prod(actions.shape[2:]), facts.action_dim)
    if wrong := [name for name, (got, need) in sizes.items() if got != need]:
        got, need = (", ".join(f"{n} of {sizes[n][side]}" for n in wrong) for side in (0, 1))
        problem = f"the batch has {got}, the model takes {need}"
        raise InputError("MODEL", problem, wrong[0], "build the model for these data")


class Losses(nn.Module):
    """A model whose forward pass is its losses, for DDP and FSDP to wrap."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return self.model.losses(batch)


def blocks_of(model: SequenceModel) -> Sequence[nn.Module]:
    """Return the layers that a model names; none if it does not."""
    return getattr(model, "blocks", ())


def total_loss(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of losses, (B, K)."""
    return reduce(torch.add, losses.values())


def _recompute_forward(block: nn.Module, forward: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *arguments, use_reentrant=False, **options)
        return forward(*arguments, **options)

    return call


@contextmanager
def calling_model(model: SequenceModel, what: str, remedy: str = "") -> Iterator[None]:
    """Raise errors of a user's model, and of compiling any model, as an `InputError`."""
    try:
        yield
    except (GearError, OSError):
        raise
    except Exception as error:
        is_own = type(model).__module__.startswith("gear_offline.")
        if type(error).__module__.startswith(COMPILERS):
            what, remedy = "compiling it", "use train.compile=off"
        elif is_own or is_out_of_memory(error):
            raise
        raise part_error(MODELS, what, type(model).__name__, error, remedy) from error


@contextmanager
def evaluation_mode(model: SequenceModel) -> Iterator[None]:
    """Switch a model that is training to evaluation, and each module back behind it."""
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train()
        for module, mode in modes:
            module.training = mode


class _WithoutDraws(TorchFunctionMode):
    """Skips the draws that would import ``torch._dynamo`` on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def weightless() -> Iterator[None]:
    """Make modules without memory or draws inside: `assign_weights` gives them weights."""
    with torch.device("meta"), _WithoutDraws():
        yield


def assign_weights(
    model: nn.Module, weights: Mapping[str, Tensor], *, copied: bool = False
) -> None:
    """Take weights as a model's own, or with `copied` their values; `ValueError` of others."""
    current = model.state_dict()
    if {name: w.shape for name, w in current.items()} != {n: w.shape for n, w in weights.items()}:
        raise ValueError("the weights do not fit the configuration")
    typed = {name: weights[name].to(like.dtype) for name, like in current.items()}
    model.load_state_dict(typed, assign=not copied)


def make_model(kind: str, facts: ModelFacts, settings: Any) -> SequenceModel:
    """Return a new model, on torch's default device."""
    kind_class = model_class(kind)
    if kind in MODELS.own:
        model = kind_class.build(facts, settings)
    else:
        with calling_part(MODELS, f"making {kind_class.__name__}", kind):
            model = kind_class.build(facts, settings)
    if any(map(is_lazy, model.parameters())):
        problem = f"{kind_class.__name__} has lazy modules, whose sizes no file of weights can tell"
        raise InputError("MODEL", problem, kind, "give them sizes, as facts.state_dim")
    names = {*model._modules, *model._parameters, *model._buffers}
    if clashes := sorted(names & {name for name in vars(SequenceModel) if name[0] != "_"}):
        problem = f"{kind_class.__name__}.{clashes[0]} is a method that all models have"
        raise InputError("MODEL", problem, kind, "rename it")
    model.part = kind, digest_of(kind) if is_part(kind) else ""
    return model


def model_class(kind: str) -> type[SequenceModel]:
    """Return the class that ``model.kind`` names."""
    candidate = find_part(MODELS, kind)
    if not (isinstance(candidate, type) and issubclass(candidate, SequenceModel)):
        problem = f"{kind} is no subclass of gear_offline.SequenceModel"
        remedy = "derive it from that class, which is a torch.nn.Module"
        raise InputError("MODEL", problem, "model.kind", remedy)
    return candidate


def typed_settings(settings: ModelSettings) -> Any:
    """Return the options of a recipe as the model's own class checks them; ``RECIPE``."""
    if not isinstance(settings, OwnModelSettings):
        return settings
    settings_class = model_class(settings.kind).Settings
    options, names = settings.model_dump(mode="json"), option_names(settings_class)
    common = {name: options.pop(name, None) for name in ModelSettings.model_fields}
    for name in options:
        if name not in names:
            near = nearest(name, names)
            hint = f"did you mean 'model.{near}'?" if near else f"{settings.kind} has "
            hint += "" if near else ", ".join(f"model.{n}" for n in names)
            raise InputError("RECIPE", f"unknown option 'model.{name}', {hint}", "model")
    options |= {name: value for name, value in common.items() if name in names}
    try:
        return TypeAdapter(settings_class).validate_json(json.dumps(options))
    except ValidationError as error:
        problems = (problem_text({**p, "loc": ("model", *p["loc"])}) for p in error.errors())
        raise InputError("RECIPE", "; ".join(problems), settings.kind) from error


def settings_dump(settings: Any) -> dict[str, Any]:
    """Return options as a recipe gives them."""
    return cast(dict[str, Any], TypeAdapter(type(settings)).dump_python(settings, mode="json"))


def model_from_config(document: Mapping[str, Any], kind: str) -> SequenceModel:
    """Return the model of a `SequenceModel.config_text`, of the part `kind`, with new weights."""
    facts = ModelFacts.model_validate_json(json.dumps(document["facts"]))
    settings_class = model_class(kind).Settings
    settings = TypeAdapter(settings_class).validate_json(json.dumps(document["settings"]))
    model = make_model(kind, facts, settings)
    model.sees_timesteps = bool(document.get("sees_timesteps", model.sees_timesteps))
    return model
