"""The fields of a batch, and the columns of a dataset that they come from.

`Window` converts the numbers of an environment to those of a window: the loader writes it,
and the policy, its folder and its ONNX file read it.

Shape legend: n rows, S state elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic import Field as Checked

from gear_offline.config.sections import LARGEST_TARGET, Condition, Span
from gear_offline.core.types import Array, Float64Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import REWARDS, ColumnSpec, channels_last
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.errors import InputError
from gear_offline.kernels.columns import Field

STATES, ACTIONS = "observations", "actions"  # columns of a dataset
EXTRA = "extras/"  # before the name of a further column, so that no name is taken twice
OBSERVED = "states/"  # before the name of one of several columns that make up a state
MOST_COLOURS = 4  # of floating frames, which have colours and ...
LEAST_SIDE = 16  # ... so many pixels on a side: smaller arrays are vectors
BEYOND_FLOAT32 = 2.0**128 - 2.0**103  # from here on float64 is rounded to infinity
STD_FLOOR = 1e-6  # added to the deviation, as the paper's code does


Moments = Annotated[tuple[Annotated[float, Checked(strict=True)], ...], Checked(strict=False)]
Values = TypeVar("Values")  # an array, or a tensor where a graph is made
METHODS = {"float16": "half", "float32": "float", "float64": "double"}  # of tensors


class StateScales(BaseModel):
    """The scales of a column of observations."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    state_mean: Moments | None = None  # S numbers each; None: states are not normalised
    state_std: Moments | None = None
    # floating states are rounded to it first, as the data hold them; None: they are as given
    state_dtype: Literal["float16", "float32", "float64"] | None = "float32"

    @model_validator(mode="after")
    def _check(self) -> Self:
        mean, std = self.state_mean, self.state_std
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise ValueError("state_mean and state_std belong together")
        if min(std or (0.0,)) < 0.0:
            raise ValueError("state_std is negative")
        return self

    @classmethod
    def of_column(cls, dataset: Dataset, column: str, *, normalize: bool, **more: Any) -> Self:
        states, moments = dataset.spec[column], dataset.statistics[column]
        if normalize and not is_image(states):
            more["state_mean"] = tuple(moments.mean.ravel().tolist())
            more["state_std"] = tuple(moments.std.ravel().tolist())
        more["state_dtype"] = states.dtype.name if states.dtype.kind == "f" else None
        return cls(**more)

    @cached_property
    def moments(self) -> tuple[Float64Array, Float64Array] | None:
        """(S,) float64 mean and divisor of the states; None: they are not normalised."""
        if self.state_mean is None or self.state_std is None:
            return None
        return np.array(self.state_mean), np.array(self.state_std) + STD_FLOOR

    def states(self, observations: Values) -> Values:
        """Return (..., S) states of an environment's observations; float64, rounded once."""
        states: Any = observations
        is_array, moments = isinstance(states, np.ndarray), self.moments
        if self.state_dtype is not None and (not is_array or states.dtype.kind == "f"):
            states = _cast(states, self.state_dtype)
        if moments is not None:
            states = _cast(states, "float64")
            if not is_array:  # a graph takes them as constants
                moments = tuple(states.new_tensor(each.tolist()) for each in moments)
            states = (states - moments[0]) / moments[1]
        scaled: Values = _cast(states, "float32")
        return scaled


class ObservedColumn(StateScales):
    """One of the columns that make up an observation."""

    name: str


class Scales(StateScales):
    """The scales of a window's numbers; each task has its own."""

    returns_scale: Annotated[float, Checked(gt=0.0)]  # returns-to-go are divided by it
    # made the data's rewards of the environment's, one after the other
    reward_edits: Annotated[tuple[RewardEdit, ...], Checked(strict=False)] = ()
    # in place of the scales above: the columns of an observation unless it is `observations` alone
    observations: Annotated[tuple[ObservedColumn, ...], Checked(strict=False)] = ()

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        *,
        normalize_states: bool,
        observations: Sequence[str] = (STATES,),
        **more: Any,
    ) -> Self:
        """Return the scales of a dataset's windows."""
        more["reward_edits"] = dataset.reward_edits or ()
        if tuple(observations) == (STATES,):
            return cls.of_column(dataset, STATES, normalize=normalize_states, **more)
        columns = (
            ObservedColumn.of_column(dataset, name, normalize=normalize_states, name=name)
            for name in observations
        )
        return cls(observations=tuple(columns), **more)

    @cached_property
    def columns(self) -> tuple[ObservedColumn, ...]:
        """The columns of an observation, at least one, in the order of the model's inputs."""
        scales = {name: getattr(self, name) for name in StateScales.model_fields}
        return self.observations or (ObservedColumn(name=STATES, **scales),)


class Window(Scales):
    """The content of a window, besides the columns themselves."""

    context_length: Annotated[int, Checked(ge=1, le=65_536)]  # K
    condition: Condition = "return"  # advantage: what is asked for stays as it is
    gamma: Annotated[float, Checked(ge=0.0, le=1.0)] = 1.0  # discount of returns-to-go
    span: Span = "episode"  # what windows end with

    def returns(self, targets: Values) -> Values:
        """Return (...,) returns-to-go of target returns in units of the data's rewards."""
        returns: Values = _cast(_cast(targets, "float64") / self.returns_scale, "float32")
        return returns

    def edit_rewards(self, rewards: Float64Array) -> Float64Array:
        """Return the data's rewards (n,) of the environment's."""
        for edit in self.reward_edits:
            rewards = edit.apply(rewards)
        return rewards

    def next_targets(self, targets: Float64Array, rewards: Float64Array) -> Float64Array:
        """Return the (n,) target returns of the next step, after `rewards` of the environment.

        With a discount of 0 the same: what is asked is then the next reward.  So are advantages.
        """
        if self.condition == "advantage":
            return targets
        rewards = self.edit_rewards(rewards)
        remaining = (targets - rewards) / self.gamma if self.gamma else targets
        return remaining.clip(-LARGEST_TARGET, LARGEST_TARGET)


def _cast(values: Any, dtype: str) -> Any:
    is_array = isinstance(values, np.ndarray)
    return values.astype(dtype) if is_array else getattr(values, METHODS[dtype])()


def standard_fields(
    source: Dataset,
    *,
    normalize_states: bool,
    frame_stack: int = 1,
    observations: Sequence[str] = (STATES,),
) -> dict[str, Field]:
    """Return the fields that every batch has, by column: dtype, shape and normalisation.

    Data without rewards have neither those nor returns-to-go.

    States are float32, except uint8 images, which stay uint8 (`is_image`).  Each column of
    several `observations` is a field; vectors are normalised and images are not.
    Integer and bool actions are discrete and become int64 of their own shape, a single one without
    a dimension; other actions are float32 with one dimension, flattened.  Rewards are float32 of
    shape (1,).  Stacks of more than one frame are for images.
    """
    f32, i64 = np.dtype(np.float32), np.dtype(np.int64)
    states, actions = [source.spec[name] for name in observations], source.spec[ACTIONS]
    rewards = [source.spec[REWARDS]] if REWARDS in source.spec else []
    for spec in (*states, actions, *rewards):
        if spec.dtype.kind == "c":
            raise _column_error(spec, "complex numbers are not supported here")
    if rewards and prod(rewards[0].shape) != 1:
        raise _column_error(rewards[0], "rewards must be one number a step")
    images = [is_image(spec) for spec in states]
    first = states[0]
    if frame_stack > 1 and not any(images):
        problem = f"frame_stack={frame_stack} is for images (uint8, two or more dimensions a "
        problem += f"step), {first.name} are {first.dtype} {first.shape}"
        remedy = "use frame_stack=1, in a recipe loader.frame_stack=1"
        raise InputError("LOADER_OPTION", problem, f"column {first.name}", remedy)
    if normalize_states and all(images):
        problem = "images are not normalised by the loader"
        remedy = "use normalize_states=False, in a recipe loader.normalize_states=false: models "
        remedy += "scale the pixels"
        raise InputError("LOADER_OPTION", problem, f"column {first.name}", remedy)
    fields = {}
    for spec, image in zip(states, images, strict=True):
        mean, divisor, shape = None, None, spec.shape or (1,)
        if normalize_states and not image:
            moments = source.statistics[spec.name]
            mean = np.asarray(moments.mean, np.float64).reshape(shape)
            divisor = np.asarray(moments.std, np.float64).reshape(shape) + STD_FLOOR
        fields[spec.name] = Field(
            name="states" if len(states) == 1 else OBSERVED + spec.name,
            dtype=spec.dtype if spec.dtype == np.uint8 and image else f32,
            shape=shape,
            mean=mean,
            divisor=divisor,
            history=frame_stack - 1 if image else 0,
        )
    discrete = is_discrete(actions)
    action_shape = () if discrete and actions.shape == (1,) else actions.shape
    fields[ACTIONS] = Field(
        name="actions",
        dtype=i64 if discrete else f32,
        shape=action_shape if discrete else (prod(action_shape),),
    )
    fields |= {REWARDS: Field(name="rewards", dtype=f32, shape=(1,))} if rewards else {}
    for column, field in fields.items():  # of several tasks each is asked by itself
        is_wide = source.spec[column].dtype == np.float64 and field.dtype == f32
        if is_wide and field.mean is None and isinstance(source, Dataset):
            facts = source.statistics[column]
            if max(np.max(facts.max), -np.min(facts.min)) >= BEYOND_FLOAT32:
                raise _too_large(f"column {column}")
    return fields


def is_discrete(actions: ColumnSpec) -> bool:
    """Return true if a column holds whole numbers: those of choices."""
    return actions.dtype.kind in "iub"


def is_image(states: ColumnSpec) -> bool:
    """Return true if a column holds frames: uint8, two or more dimensions a step.

    Floating ones have colours, last or first: (h, w, C) or (C, h, w).
    """
    if states.dtype.kind != "f" or len(states.shape) != 3:
        return states.dtype == np.uint8 and len(states.shape) >= 2
    *sides, colours = channels_last(states.shape)
    return min(sides) >= LEAST_SIDE and colours <= MOST_COLOURS


def to_float32(values: Array, column: str, first_step: int, *, finite: bool = False) -> Array:
    """Round to float32, refusing finite values that would become infinite.

    `finite` says that the values were computed from finite ones: then no infinity is allowed.
    """
    if values.dtype == np.float32 and not finite:
        return values  # nothing is rounded
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32, copy=False)
    if np.isfinite(rounded).all():
        return rounded
    lost = np.isinf(rounded) & (np.isfinite(values) | finite)
    if lost.any():
        step = first_step + int(np.argwhere(lost)[0][0])
        raise _too_large(f"column {column}, step {step}")
    return rounded


def _too_large(where: str) -> InputError:
    remedy = "scale the column in the source, or raise returns_scale for returns-to-go"
    return InputError("COLUMN", "a value is too large for float32", where, remedy)


def _column_error(spec: ColumnSpec, problem: str) -> InputError:
    problem = f"{spec.name} is {spec.dtype} {spec.shape} a step: {problem}"
    remedy = "convert the source with columns of the kinds that docs/reference/batch.md lists"
    return InputError("COLUMN", problem, f"column {spec.name}", remedy)
