"""`GearLoader`: an endless stream of batches that is a pure function of (seed, step).

Several steps are selected and gathered in one pass and handed out one by one; the saved position
counts what was handed out, not what was prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from gear_offline.core.closing import Closing
from gear_offline.core.types import Int64Array
from gear_offline.dataset.dataset import open_dataset
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.kernels.gather import CpuGather, Padding, Windows
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.device_batches import DeviceBatches, make_batches, split
from gear_offline.loaders.disk_choice import open_disk
from gear_offline.loaders.engine_choice import Engine, Gather, make_engine
from gear_offline.loaders.feedback import check_updates, update_count
from gear_offline.loaders.node_table import node_table
from gear_offline.loaders.options import (
    check_options,
    check_state,
    check_table,
    choose_sampler,
    need_rows,
    no_engine,
    window_bytes,
)
from gear_offline.loaders.options import resolve_device as resolve_device
from gear_offline.loaders.spread_choice import Sharding, choose_share, open_spread
from gear_offline.loaders.task_bounds import task_bounds
from gear_offline.sampling import Sampler, Segments, check_range
from gear_offline.sampling.base import plain
from gear_offline.sampling.stream import Stream
from gear_offline.tables.disk import DiskGather
from gear_offline.tables.joint import Source, source_digest, source_name
from gear_offline.tables.placement import Placement
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    from gear_offline.distributed.sharding import NodeShare
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.loaders.sharded import ShardedBatches

STATE_FORMAT = 1
BLOCK_SEGMENTS = 16384  # segments selected and gathered in one pass, at most ...
BLOCK_BYTES = 32 << 20  # ... and at most this many bytes, at least one batch
SPREAD_STEPS = 32  # of a dataset spread over nodes: the first batch waits for all assignments


class GearLoader(Closing, Iterator[Batch]):
    """Batches of segments of a dataset, without end.

    The batch of a step depends on the dataset, the seed, the step and the options here; not on
    the device, earlier steps or the number of steps prepared at a time.

    Parameters
    ----------
    dataset
        An opened dataset, or the directory of one, each block of which is then compared with its
        digest when it is loaded.
    batch_size
        Segments in a batch, B; over all ranks of `world`.
    context_length
        Steps in a window, K.
    selection
        Name of a strategy, or what `make_sampler` returns, which takes options.
    seed
        In ``[0, 2**64)``.
    device
        ``"auto"`` (CUDA if there is one), or a torch device.
    padding
        Side on which windows that reach beyond their episode's end are filled up with zeros.
    gamma, returns_scale, normalize_states, extra_columns
        As `gear_offline.tables.table.build_table`.
    frame_stack
        S, frames that make up a state, for images; the dataset holds single frames.  Stack `s` of
        step `t` is the frame of step ``t - (S - 1) + s`` of the episode, zeros before its first.
        ``states``, ``(B, K, S, *frame)``, is a view of K + S - 1 frames a segment.
    start_step
        Step of the first batch.
    engine
        For CUDA.  ``"on"``: segments are selected and gathered by the GPU, from wherever
        `placement` puts the rows.  ``"off"``: they are gathered by the CPU into page-locked memory
        and copied on the current stream.  ``"auto"``: on where that is possible, else off, and a
        line on stderr says why.  The batches are the same bits.
    placement, hbm_budget
        As `tables.placement.place_table`, for the engine.  ``"disk"``: the rows stay in the
        shards and are read ahead of use, whatever the device.  ``"auto"`` does that too where the
        table does not fit host memory, and a line on stderr says so.
    host_budget
        For ``"disk"`` and ``"auto"``: bytes of host memory of this process that the rows may take;
        by default half of what is available when they stay on disk, all of it otherwise.
    sharding
        With a `world` of several nodes.  ``"replicate"``: each holds all rows.  ``"shard"``: each
        holds some of the shards.  ``"auto"``: that only where a node has too little memory.
    exchange
        With ``"shard"``, how rows travel: the mode of `distributed.exchange.open_exchange`.
    world
        The ranks that share each batch equally: `batch_size` is that of all together, and this
        rank's batches have its share of the slots, in order.  The processes of a node hold the
        table in host memory once.
    table
        In place of reading the dataset: what `gear_offline.tables.table.build_table` made of it
        with the same options, such as `table` of another loader.

    Attributes
    ----------
    dataset, selection, device, world, batch_size, context_length, padding, seed, extra_columns
        As given; opened, made or found where a name was given.
    learner
        The selection if it learns from losses, else None; see `gear_offline.loaders.feedback`.
    table, engine, disk, spread
        What batches are made from: rows in memory, the GPU that gathers, the reader of rows on
        disk, the rows of other nodes; None where it is not used.  To look at, not to change.

    Raises
    ------
    InputError
        ``LOADER_OPTION``; ``SELECTION``; those of
        `gear_offline.tables.table.build_table` and `open_dataset`.
    UnavailableError
        ``DEVICE`` if a CUDA device is asked for and there is none; with ``engine="on"``
        ``ENGINE_OFF``, ``PACKAGE_MISSING``, ``DEVICE``.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import gear_offline as go
    >>> loader = go.GearLoader("tiny", batch_size=4, context_length=5, device="cpu")
    >>> batch = next(loader)
    >>> batch.states.shape, batch.attention_mask.shape
    (torch.Size([4, 5, 3]), torch.Size([4, 5]))
    >>> state, following = loader.state_dict(), next(loader)
    >>> loader.load_state_dict(state)
    >>> bool((next(loader).states == following.states).all())
    True
    """

    def __init__(
        self,
        dataset: Source | str | Path,
        *,
        batch_size: int,
        context_length: int = 20,
        selection: str | Sampler = "uniform_steps",
        seed: int = 0,
        device: str | torch.device = "auto",
        padding: Padding = "right",
        gamma: float = 1.0,
        returns_scale: float = 1.0,
        normalize_states: bool = False,
        extra_columns: Sequence[str] = (),
        frame_stack: int = 1,
        start_step: int = 0,
        engine: Engine = "auto",
        placement: Placement | Literal["disk"] = "auto",
        hbm_budget: int | None = None,
        host_budget: int | None = None,
        sharding: Sharding = "auto",
        exchange: Engine = "auto",
        world: World | None = None,
        table: Table | None = None,
    ) -> None:
        batch_size, context_length, frame_stack = check_options(
            batch_size=batch_size,
            context_length=context_length,
            frame_stack=frame_stack,
            padding=padding,
            gamma=gamma,
            returns_scale=returns_scale,
            engine=engine,
            exchange=exchange,
            world=world,
            extra_columns=extra_columns,
        )
        check_range(seed, start_step, 0, batch_size)
        self.device = resolve_device(device)
        if engine == "on" and self.device.type != "cuda":
            raise no_engine(f"engine='on' needs a CUDA device, batches go to {self.device}")
        self.world = World() if world is None else world
        if isinstance(dataset, (str, Path)):
            dataset = open_dataset(dataset, verify=False)
        self.dataset = dataset
        self._task_bounds = task_bounds(self.dataset, self.device)
        self.selection = choose_sampler(selection, self.dataset, context_length, padding)
        self.learner = self.selection.learner  # see gear_offline.loaders.feedback
        law = {"gamma": float(gamma), "returns_scale": float(returns_scale)}
        self._law = law | {"normalize_states": bool(normalize_states)}
        self.share = self.world.share(batch_size)
        if not self.world.feeds:  # it holds no rows, whatever the options say
            self.share, placement, engine, sharding = 0, "host", "off", "replicate"
        self._stream = Stream(
            selection=self.selection,
            seed=int(seed),
            batch_size=batch_size,
            first_slot=self.world.rank * self.share,
            share=self.share,
        )
        sizes: dict[str, Any] = {
            "context_length": context_length,
            "normalize_states": bool(normalize_states),
            "extra_columns": tuple(extra_columns),
            "frame_stack": frame_stack,
        }
        rows: dict[str, Any] = {"gamma": float(gamma), "returns_scale": float(returns_scale)}
        rows |= sizes
        self.disk: DiskGather | None = None
        node_share: NodeShare | None = None
        if table is None:
            self.disk = open_disk(
                self.dataset,
                self._stream,
                self.world,
                placement=placement,
                host_budget=host_budget,
                engine=engine,
                device=self.device,
                padding=padding,
                **rows,
            )
        else:
            check_table(table, self.dataset, context_length, frame_stack)
        if table is None and self.disk is None:
            node_share = choose_share(self.dataset, self.world, sharding, self.selection, **sizes)
            shards = None if node_share is None else node_share.shards.tolist()
            table = node_table(self.world, self.dataset, shards=shards, **rows)
        self.table = self.disk.table if table is None and self.disk else cast(Table, table)
        self.batch_size = batch_size
        self.context_length = context_length
        self.padding: Padding = padding
        self.seed = int(seed)
        self.extra_columns = tuple(extra_columns)
        self.frame_stack = frame_stack
        self._moves = self.device.type != "cpu"
        self.engine: GpuGather | None = None
        if self.device.type == "cuda" and engine != "off" and placement != "disk" and not self.disk:
            self.engine = make_engine(
                self.table,
                self._stream,
                device=self.device,
                world=self.world,
                engine=engine,
                placement=placement,
                hbm_budget=hbm_budget,
                context_length=context_length,
                padding=padding,
            )
        if self.engine is not None and not self.engine.reads_host and node_share is None:
            self.table = self.table.without_rows()  # the GPU holds them all
        self._gather: Gather | None = self.disk
        if self.disk is None and self.engine is None:
            need_rows(self.table)
            self._gather = CpuGather(
                self.table.groups,
                self.table.episodes.offsets,
                margin=self.table.margin,
                context_length=context_length,
                padding=padding,
                pin=self._moves,
            )
        self.spread: ShardedBatches | None = None
        if node_share is not None:
            local = self._gather.fill if self._gather else cast("GpuGather", self.engine).gather
            self.spread = open_spread(
                self._stream,
                self.world,
                node_share,
                self.table,
                gather=local,
                exchange=exchange,
                steps=min(self._steps_per_block(), SPREAD_STEPS),
                context_length=context_length,
                padding=padding,
            )
        self._dataset_digest = source_digest(self.dataset)
        self._step = int(start_step)
        self._block_steps = self._steps_per_block()
        self._ready: list[Batch] = []  # the next batches, last one first

    def __repr__(self) -> str:
        return (
            f"GearLoader({source_name(self.dataset)!r}: {self.batch_size} x {self.context_length} "
            f"steps a batch, {self.selection.name}, seed {self.seed}, padding {self.padding}, on "
            f"{self.device}, next step {self._step:,})"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise InputError(
            "LOADER_OPTION",
            "a loader cannot be copied into another process",
            remedy="make it there: its batches follow from dataset, options and step",
        )

    @property
    def step(self) -> int:
        """Step of the next batch: how many were handed out, when started at 0."""
        return self._step

    @property
    def max_episode_length(self) -> int:
        """Steps of the longest episode; timesteps are below it."""
        return int(self.dataset.episodes.lengths.max())

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader itself, which goes on where it is."""
        return self

    def __next__(self) -> Batch:
        """Return the batch of `step` and advance."""
        if get_worker_info() is not None:  # each worker's copy would give the same batches
            raise InputError(
                "LOADER_OPTION",
                "a loader gives no batches to worker processes of a DataLoader",
                remedy="the loader itself is the iterable, of whole batches: for batch in loader",
            )
        if not self._ready:
            self._ready = self._batches(self._step, self._block_steps, ahead=True)[::-1]
        self._step += 1  # before `pop`, behind which an interruption may come
        return self._ready.pop()

    def skip(self, steps: int = 1) -> None:
        """Advance the position without making batches."""
        check_range(self.seed, self._step + steps, 0, 1)
        self._step += int(steps)
        self._ready = []

    def batch_at(self, step: int) -> Batch:
        """Return the batch of any step; the position stays."""
        return self._batches(step, 1)[0]

    def segments_at(self, step: int) -> Segments:
        """Return the segments of any step, (B,), with the probability of each; of all ranks."""
        return self.selection.sample(self.seed, step, 1, self.batch_size)[0]

    def slots_at(self, step: int) -> Int64Array:
        """Return (share,) int64: which slots of a step's global batch this rank's batch holds."""
        if self.spread is not None:
            return self.spread.slots_at(step)
        return np.arange(self.share) + self._stream.first_slot

    def device_batches(
        self, *, ahead: bool = False, windows: Windows | None = None
    ) -> DeviceBatches:
        """Return a batch in GPU memory that is filled in place, for CUDA graphs.

        It begins at `step`; its position is its own.  With `ahead` rows that come from host memory
        in bulk are fetched while the step before is computed.  It lies in `windows` if given, see
        `gear_offline.loaders.device_batches.side_by_side`.

        Raises
        ------
        UnavailableError
            ``ENGINE_OFF`` unless the loader has a GPU engine.
        """
        if self.engine is None or not self.engine.draws or self.spread is not None:
            raise no_engine("the GPU alone does not gather this loader's batches")
        options: dict[str, Any] = {"padding": self.padding, "task_bounds": self._task_bounds}
        return make_batches(
            self.engine,
            step=self._step,
            ahead=ahead,
            learns=self.learner is not None,
            windows=windows,
            **options,
        )

    def model_inputs(self) -> Iterator[dict[str, Tensor]]:
        """Iterate, from the same position, over dictionaries for a Hugging Face ``Trainer``."""
        for batch in self:
            yield batch.model_inputs()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it belongs to, JSON-able.

        `step` counts the batches that were handed out, whatever is prepared ahead.
        """
        position = {"format": STATE_FORMAT, "step": self._step}
        return position | update_count(self.learner) | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was saved.

        Raises
        ------
        InputError
            ``LOADER_STATE`` if the state is damaged or belongs to another dataset, seed,
            selection or shape of batch; the loader stays as it was.
        """
        step = check_state(state, self._identity(), STATE_FORMAT)
        check_updates(self.learner, state)
        self._step = step
        self._ready = []

    def close(self) -> None:
        """Stop reading from disk or from other nodes; the loader gives no further batches then.

        Batches that were handed out stay valid.  Dropping the loader does the same for the disk;
        with several nodes all ranks close together.
        """
        for part in (self.disk, self.spread):
            if part is not None:
                part.close()
                self._ready = []

    def _identity(self) -> dict[str, Any]:
        """Return what the content of batches depends on, besides the step."""
        return {
            "seed": self.seed,
            "selection": {
                "name": self.selection.name,
                "options": plain(asdict(self.selection.options)),
            },
            "batch_size": self.batch_size,
            "context_length": self.context_length,
            "frame_stack": self.frame_stack,
            "padding": self.padding,
            **self._law,
            "dataset": self._dataset_digest,
        }

    def _steps_per_block(self) -> int:
        if self.learner is not None:
            return 1  # the next step depends on the losses of this one
        batch_bytes = self.share * window_bytes(self.table, self.context_length)
        most_segments, most_bytes = BLOCK_SEGMENTS, BLOCK_BYTES
        if self.disk:
            most_segments, most_bytes = self.disk.sizes.block_limits(most_segments, most_bytes)
        steps = min(most_segments // self.batch_size, most_bytes // max(batch_bytes, 1))
        return max(1, steps if self.spread is None else min(steps, SPREAD_STEPS))

    def _batches(self, first_step: int, steps: int, *, ahead: bool = False) -> list[Batch]:
        """Select, gather and move the batches of `steps` steps; `ahead`: the next ones follow."""
        if self.spread is not None:
            windows = self.spread.windows(first_step, steps)
        elif self.engine is not None and self.engine.draws:
            windows = self.engine.fill(first_step=first_step, steps=steps)
        elif self.engine is not None:
            windows = self.engine.gather(self._stream.segments(first_step, steps))
        elif ahead and self.disk is not None:
            windows = self.disk.fill_steps(first_step=first_step, steps=steps)
        else:
            assert self._gather is not None, "what gathers is the GPU, the disk or the CPU"
            windows = self._gather.fill(self._stream.segments(first_step, steps))
        moved = windows
        if self._moves:
            moved = windows.map(lambda t: t.to(self.device, non_blocking=True))
        return split(moved, self.padding, self._task_bounds)
