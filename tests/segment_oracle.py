"""Sampling of the Decision Transformer paper, as plain loops; slow and obvious.

Chen et al. 2021 ("Decision Transformer: Reinforcement Learning via Sequence Modeling"): a batch
element is a window of up to K consecutive steps of one trajectory, cut where the trajectory ends
and padded to K; its returns-to-go are the sums of the rewards from each step to the end of the
trajectory.  Here in Python floats, one element at a time, with nothing shared with the package.

Also a table source over arrays in memory, without files.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.batches.tables.table import Table, TableOptions, build_table
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import CpuGather, Padding, Windows
from tests.support import hopper_columns

Array = npt.NDArray[Any]


class MemoryTable(Dataset):
    """A dataset of arrays in memory, without files; `pieces` cuts it in shards."""

    def __init__(
        self, columns: Mapping[str, Array], lengths: Sequence[int], *, pieces: int = 1
    ) -> None:
        index = EpisodeIndex(np.asarray(lengths, dtype=np.int64))
        cuts = np.linspace(0, len(lengths), min(pieces, len(lengths)) + 1).astype(int)
        vars(self).update(
            path=Path("memory"),
            name="memory",
            columns=dict(columns),
            episodes=index,
            first_steps=index.offsets[cuts],
        )

    columns: dict[str, Array]

    @property
    def spec(self) -> TableSpec:
        specs = (
            ColumnSpec(name=name, dtype=values.dtype, shape=values.shape[1:])
            for name, values in self.columns.items()
        )
        index = self.episodes
        return TableSpec(columns=tuple(specs), steps=index.steps, episodes=index.episodes)

    @property
    def statistics(self) -> Any:
        with np.errstate(all="ignore"):  # bytes of an extra column may be any number
            return {
                name: SimpleNamespace(
                    mean=wide.mean(0), std=wide.std(0), min=wide.min(0), max=wide.max(0)
                )
                for name, values in self.columns.items()
                if values.dtype.kind != "c" and (wide := values.astype(np.float64)) is not None
            }

    def stream(
        self, shard: int, column: str, *, chunk_bytes: int = 1 << 20
    ) -> Iterator[tuple[int, Array]]:
        first, end = self.first_steps[shard : shard + 2].tolist()
        rows = min(max(chunk_bytes // self.spec[column].step_bytes, 1), end - first)
        for begin in range(first, end, rows):
            yield begin, self.columns[column][begin : min(begin + rows, end)].copy()


def memory_table(
    lengths: Sequence[int], span: int, *, width: int = 3, rewards: str = "float32"
) -> Table:
    """Return the table of a dataset of numbers."""
    columns = hopper_columns(sum(lengths), seed=width, state_dim=width, action_dim=2)
    columns["rewards"] = columns["rewards"].astype(rewards)
    return build_table(MemoryTable(columns, lengths), TableOptions(context_length=span))


def oracle_window(
    columns: Mapping[str, Array], lengths: Sequence[int], episode: int, start: int, *,
    context_length: int, padding: str, gamma: float = 1.0, returns_scale: float = 1.0,
) -> dict[str, list[Any]]:  # fmt: skip
    """Return each field of one window as a list of K entries; ``None`` is padding.

    Columns keep their own values (no cast); ``returns_to_go`` are Python floats.
    """
    first = sum(lengths[:episode])
    fields: dict[str, list[Any]] = {name: [] for name in columns}
    fields["returns_to_go"], fields["timesteps"] = [], []
    for step in range(start, min(start + context_length, lengths[episode])):
        for name, values in columns.items():
            fields[name].append(values[first + step])
        rest = 0.0
        for later in reversed(range(step, lengths[episode])):
            rest = float(columns["rewards"][first + later].reshape(())) + gamma * rest
        fields["returns_to_go"].append(rest / returns_scale)
        fields["timesteps"].append(step)
    missing = [None] * (context_length - len(fields["timesteps"]))
    return {
        name: values + missing if padding == "right" else missing + values
        for name, values in fields.items()
    }


def expect(values: Sequence[Any], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
    """Return (K, *shape): each entry cast on its own, zeros for padding."""
    found = np.zeros((len(values), *shape), dtype=dtype)
    for place, value in enumerate(values):
        if value is not None:
            found[place] = np.asarray(value).astype(dtype).reshape(shape)
    return found


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two arrays agree in shape, dtype and every bit (NaN payloads included)."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
    )


def cpu_gather(
    table: Table, context_length: int, padding: Padding = "right", **options: Any
) -> CpuGather:
    """Return the gather of a table; `offsets` and `local` if it has some episodes of a dataset."""
    offsets = options.pop("offsets", table.episodes.offsets)
    return CpuGather(
        table.groups,
        np.diff(offsets),
        table.first_rows(options.pop("local", None)),
        context_length=context_length,
        padding=padding,
        **options,
    )


def all_segments(lengths: Sequence[int]) -> Segments:
    """Return every (episode, start) of the table."""
    pairs = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
    episodes, starts = np.array(pairs, dtype=np.int64).T
    return Segments(episodes=episodes.copy(), starts=starts.copy(), probability=np.ones(len(pairs)))


def bits(windows: Windows) -> list[bytes]:
    """Return the bytes of everything that a gather gives."""
    tensors = [*windows.buffers, windows.timesteps, windows.attention_mask, windows.segments]
    return [tensor.cpu().numpy().tobytes() for tensor in tensors]
