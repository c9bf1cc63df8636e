"""One batch of segments, as a model takes it.

Shape legend: B segments, K steps of a window, S and A per-step shapes of states and actions; with
`frame_stack` above 1, S is (frames of a stack, *frame).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Never

import torch
from torch import Tensor

from gear_offline.batches.tables.fields import EXTRA, OBSERVED
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.loaders.chunks import CHUNK_ACTIONS, CHUNK_MASK
from gear_offline.loaders.goals import GOALS

OTHER_NAMES = {  # of the same things, in datasets and elsewhere
    **dict.fromkeys(("observations", "obs"), "states"),
    **dict.fromkeys(("dones", "terminals", "terminated"), "extra_columns=['terminals'] and extras"),
    **dict.fromkeys(("rtg", "returns", "return_to_go"), "returns_to_go"),
    "mask": "attention_mask",
}


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Segments with their padding: zeros, but padded stacks of frames repeat the window's frames.

    Attributes
    ----------
    states
        ``(B, K, *S)`` float32; uint8 for images.  Several columns are a mapping of names to these.
        Stacks of frames are a view in which a frame appears several times: call `contiguous`
        before writing to it.
    actions
        ``(B, K, A)`` float32, those of several dimensions a step flattened; or ``(B, K, *A)`` int64
        for discrete actions (``(B, K)`` for one a step).
    rewards
        ``(B, K, 1)`` float32; they and `returns_to_go` are None of data without rewards.
    returns_to_go
        ``(B, K, 1)`` float32, own reward included, over the rest of the whole episode.
    timesteps
        ``(B, K)`` int64, step within the episode, of which a window may have several (`span`).
    attention_mask
        ``(B, K)`` int64, 1 on real steps.
    segments
        ``(B, 2)`` int64: episode, start.
    padding
        Side on which the padding is.
    extras
        Further columns, ``(B, K, *shape)`` in their source dtype; `goals`, `chunk_actions` and
        `chunk_mask`.  Where draws are counted (``data.max_times_sampled``) also ``probability``,
        ``times_sampled`` and ``table_size``, ``(B,)``, as in `gear_offline.kernels.draws.Segments`.
    task_bounds
        ``(T - 1,)`` int64, the first episode of each task but the first, where the batch is of
        several tasks; else None.
    """

    states: Any  # a Tensor, or a dict of them
    actions: Tensor
    rewards: Any  # a Tensor, or None
    returns_to_go: Any
    timesteps: Tensor
    attention_mask: Tensor
    segments: Tensor
    padding: Literal["right", "left"] = field(default="right", kw_only=True)
    extras: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    task_bounds: Tensor | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        descriptions = (
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, values in (self._fields() | dict(self.extras)).items()
            for name, tensor in (values if isinstance(values, dict) else {name: values}).items()
        )
        return f"Batch({', '.join(descriptions)}; on {self.device}, padding {self.padding})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; tensors that are parts of a larger block are copied."""
        fields = self._tensors()
        states = fields.pop("states")
        tensors = [*fields.values(), *(states.values() if isinstance(states, dict) else [states])]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        if sum(storages.values()) <= 2 * sum(tensor.nbytes for tensor in tensors):
            return self.__dict__
        return self.map(lambda tensor: tensor.contiguous().clone()).__dict__

    # A mapping as Hugging Face's BatchEncoding, but none that libraries make anew of its tensors.

    def _tensors(self) -> dict[str, Any]:
        return {**self._fields(), "segments": self.segments, **self.extras}

    keys: ClassVar[Any] = Mapping.keys
    values: ClassVar[Any] = Mapping.values
    items: ClassVar[Any] = Mapping.items
    get: ClassVar[Any] = Mapping.get

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors()

    def __len__(self) -> int:
        """Return the number of tensors; B is ``len(batch.segments)``."""
        return len(self._tensors())

    def __getitem__(self, name: str) -> Any:
        tensors = self._tensors()
        if name not in tensors:
            without = ", of data without rewards," if self.rewards is None else ""
            raise KeyError(f"{name!r}; a batch{without} has {', '.join(tensors)}")
        return tensors[name]

    def __getattr__(self, name: str) -> Never:
        hint = OTHER_NAMES.get(name)
        remedy = f"; did you mean {hint}?" if hint else ""
        raise AttributeError(f"a Batch has no attribute {name!r}{remedy}")

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.segments.device

    @property
    def goals(self) -> Tensor | None:
        """``(B, 1, *S)``, the state of each segment's goal, as `states`; None without goals."""
        return self.extras.get(GOALS)

    @property
    def chunk_actions(self) -> Tensor | None:
        """``(B, C, ...)``, as `actions`: those of the episode's steps t to t + C - 1.

        Step t is the window's last real one.  Behind the episode's end its last action is repeated.
        None of a loader without `chunk`.
        """
        return self.extras.get(CHUNK_ACTIONS)

    @property
    def chunk_mask(self) -> Tensor | None:
        """``(B, C)`` int64, 1 where a step of `chunk_actions` is in the episode."""
        return self.extras.get(CHUNK_MASK)

    @property
    def episode_starts(self) -> Tensor:
        """``(B, K)`` bool, true at each step that begins an episode."""
        return (self.timesteps == 0) & (self.attention_mask == 1)

    @property
    def tasks(self) -> Tensor | None:
        """``(B,)`` int64, the task of each segment; None without tasks.

        Each access searches for the segments anew, on the batch's own device, so it is right in a
        batch that a CUDA graph fills again and again.
        """
        if self.task_bounds is None:
            return None
        return torch.bucketize(self.segments[:, 0].contiguous(), self.task_bounds, right=True)

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the Hugging Face Decision Transformer.

        ``states`` of several columns of observations are their mapping.  With several tasks also
        ``tasks``, with goals ``goals``; the released class ignores both.
        """
        more = {"tasks": self.tasks, "goals": self.goals}
        return self._fields() | {name: value for name, value in more.items() if value is not None}

    def _fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in (*_FIELDS, *_NAMED[:2])}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`; tensors that are there already are not copied.

        With `non_blocking`, copies from page-locked memory are enqueued and not waited for.
        """
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def contiguous(self) -> Batch:
        """Return the batch with every tensor contiguous, copying only those that are not."""
        return self.map(lambda tensor: tensor.contiguous())

    def part(self, segments: slice | Tensor) -> Batch:
        """Return some of the segments; of a slice views."""
        return self.map(lambda tensor: tensor[segments])

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` of every tensor."""
        segments, bounds = change(self.segments), self.task_bounds
        fields: dict[str, Any] = dict.fromkeys(_FIELDS)
        return Batch(
            **fields | {name: _each(change, value) for name, value in self._fields().items()},
            segments=segments,
            padding=self.padding,
            extras={name: change(tensor) for name, tensor in self.extras.items()},
            task_bounds=None if bounds is None else bounds.to(segments.device),  # not of segments
        )


def _each(change: Callable[..., Tensor], *values: Any) -> Any:
    """Apply `change` to tensors, or to those of equal names."""
    if isinstance(values[0], dict):
        return {name: change(*(value[name] for value in values)) for name in values[0]}
    return change(*values)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the segments of batches of equal shapes one after another; without tasks."""
    first = batches[0]
    mappings = [batch._fields() | {"segments": batch.segments} for batch in batches]
    fields: dict[str, Any] = dict.fromkeys(_FIELDS)
    for name in mappings[0]:
        fields[name] = _each(lambda *t: torch.cat(t), *(mapping[name] for mapping in mappings))
    return Batch(
        **fields,
        padding=first.padding,
        extras={name: torch.cat([b.extras[name] for b in batches]) for name in first.extras},
    )


def split_steps(
    windows: Windows,
    padding: Padding,
    task_bounds: Tensor | None = None,
    gathered: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Batch]:
    """Return the batch of each step of windows (steps, B, K, ...); views, nothing is copied.

    `gathered` are further extras, (steps, B, ...) by name.
    """
    fields: dict[str, Any] = {name: [None] * len(windows.segments) for name in _FIELDS}
    fields |= {name: getattr(windows, name).unbind(0) for name in _NAMED}
    # over ends of episodes timesteps are a column
    fields |= {name: tensor.unbind(0) for name, tensor in windows.tensors().items()}
    fields |= {EXTRA + name: tensor.unbind(0) for name, tensor in gathered.items()}
    extras = {n.removeprefix(EXTRA): fields.pop(n) for n in [*fields] if n.startswith(EXTRA)}
    states = {n.removeprefix(OBSERVED): fields.pop(n) for n in [*fields] if n.startswith(OBSERVED)}
    if states:
        fields["states"] = _rows(states)
    fields["extras"] = _rows(extras) if extras else ({} for _ in range(len(windows.segments)))
    fields |= {"padding": repeat(padding), "task_bounds": repeat(task_bounds)}
    batches = [Batch.__new__(Batch) for _ in range(len(windows.segments))]
    # The constructor of a frozen class sets each field by itself: half the time of a small batch.
    for batch, values in zip(batches, _rows(fields), strict=True):
        object.__setattr__(batch, "__dict__", values)
    return batches


def _rows(columns: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Yield a mapping of names to values for each row of some columns."""
    names = tuple(columns)
    return (dict(zip(names, row)) for row in zip(*columns.values()))  # noqa: B905 - as many


# Fields of a `Batch` in its order: from the table, then from the windows.
_FIELDS = ("states", "actions", "rewards", "returns_to_go")
_NAMED = ("timesteps", "attention_mask", "segments")
