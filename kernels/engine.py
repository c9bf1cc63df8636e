"""The GPU's loader: one launch from (seed, step) to finished batches, wherever the rows lie.

The CPU twin is `sampling` with `kernels.gather`; both give the same
bits.  Nothing here waits for the GPU.

Shape legend: B segments a step, K steps of a window, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.arrays import DeviceArrays
from gear_offline.kernels.columns import ColumnGroup
from gear_offline.kernels.copy_engine import LongWindows
from gear_offline.kernels.cuda_module import Function, Parameters, load
from gear_offline.kernels.gather import Padding, Windows, torch_dtype
from gear_offline.kernels.job import describe_group, describe_job, group_of, leave_out
from gear_offline.kernels.rules import (
    CHOSEN,
    PLAIN,
    WEIGHTED_EPISODES,
    describe_rule,
    law_number,
)
from gear_offline.kernels.segments import Segments
from gear_offline.tables.placement import PlacedGroup, PlacedTable

if TYPE_CHECKING:
    from gear_offline.sampling import Sampler

THREADS = 256
BLOCKS_PER_SM = 8  # more only waits
KERNELS = {8: "8", 16: "16", 32: "32"}  # by the lanes of a task
MANY = "many"
FILL, LAWS = "fill", "laws"  # sources: the plain laws; all of them, and probabilities
LONG_BYTES = 1536  # from here on, a warp for each window reads host memory a little faster


class DeviceEngine:
    """Fills windows on a GPU.

    Parameters
    ----------
    placed
        Where the rows lie.
    selection
        What draws the segments; where it has no `gpu`, the host does.
    seed, batch_size, context_length, padding
        As `gear_offline.loaders.loader.GearLoader`.
    first_slot
        Of the global batch; `batch_size` slots from here on are filled.
    global_batch
        Slots of the global batch; by default those up to the last one that is filled.

    Raises
    ------
    UnavailableError
        ``CUPY_MISSING``, ``CUPY_BROKEN``, ``GPU_TOO_OLD``.
    InputError
        ``COLUMN_KIND``, ``EXTRA_COLUMN`` for columns that it does not take.
    """

    def __init__(
        self,
        placed: PlacedTable,
        selection: Sampler,
        *,
        seed: int,
        batch_size: int,
        context_length: int,
        padding: Padding = "right",
        first_slot: int = 0,
        global_batch: int | None = None,
    ) -> None:
        law = CHOSEN if selection.gpu is None else law_number(selection.gpu)
        self.placed, self.device = placed, placed.device
        self.selection, self.seed, self.first_slot = selection, seed, first_slot
        self.batch_size, self.context_length = batch_size, context_length
        self.global_batch = global_batch or first_slot + batch_size
        self._kernels: dict[str, Function] = {}
        self._load(FILL)
        self._arrays = DeviceArrays(self.device)  # what addresses in the job point to
        offsets = placed.episodes.offsets
        guide, shift = self._arrays.guide(offsets)
        self._job = describe_job(
            [self._row(group) for group in placed.groups],
            seed=seed,
            law=law,
            offsets=self._arrays.keep(offsets),
            guide=guide,
            shift=shift,
            episodes=placed.episodes.episodes,
            steps=placed.episodes.steps,
            per_step=batch_size,
            first_slot=first_slot,
            whole=self.global_batch,
            span=context_length,
            left=int(padding == "left"),
        )
        self._source = FILL if law in (*PLAIN, CHOSEN) else LAWS
        # A node's part of a spread dataset is gathered from by name only.
        if selection.gpu is not None and selection.index.steps <= placed.episodes.steps:
            self._tell_law(law)
        self._long = LongWindows(placed, span=context_length, padding=padding)
        self._ticket = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._job["ticket"] = self._ticket.data_ptr()
        self._job["wrong"] = self._ticket.data_ptr() + 8
        self._lanes = self._lanes_of()
        self._row_sum = sum(group.row_bytes for group in placed.groups)
        self._most_blocks = (
            BLOCKS_PER_SM * torch.cuda.get_device_properties(self.device).multi_processor_count
        )

    def fill(self, *, first_step: int, steps: int) -> Windows:
        """Return the windows of `steps` consecutive steps, (steps, B, K, ...), in new memory.

        One launch on torch's current stream; long windows of host memory are copied besides.
        """
        if self.selection.gpu is None:
            return self.gather(self._drawn(first_step, steps))
        windows = self.allocate((steps, self.batch_size))
        job = self._job.copy()
        job["first_step"] = first_step
        self._launch(job, windows, source=self._source, without=self._long.numbers)
        if self._long.numbers:
            self._long.copy(windows, self._drawn(first_step, steps))
        return windows

    def _drawn(self, first_step: int, steps: int) -> Segments:
        drawn = self.selection.sample(self.seed, first_step, steps, self.global_batch)
        return drawn[:, self.first_slot : self.first_slot + self.batch_size]

    def gather(self, segments: Segments, *, out: Windows | None = None) -> Windows:
        """Return the windows of named segments, of any leading shape; in `out` if given.

        Raises
        ------
        InputError
            ``SEGMENT_RANGE``
        """
        episodes, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
        index = self.placed.episodes
        known = (episodes >= 0) & (episodes < index.episodes) & (starts >= 0)
        if not (known & (starts < index.lengths[np.where(known, episodes, 0)])).all():
            raise InputError(
                "SEGMENT_RANGE",
                "a segment begins outside the table",
                remedy=f"use episodes below {index.episodes} and starts below their lengths",
            )
        rows = [episodes, starts]
        if segments.lengths is not None:
            rows.append(segments.lengths.reshape(-1))
        named = torch.from_numpy(np.stack(rows).astype(np.int64)).to(self.device)
        windows = self.allocate(segments.shape) if out is None else out
        self._gather(windows, named, without=self._long.numbers)
        self._long.copy(windows, segments)
        return windows

    def gather_into(self, windows: Windows, named: Tensor) -> None:
        """As `gather`, of int64 rows on the device, into given memory.

        (2, n) episodes and starts, or (3, n) with the steps of each window at most.

        Segments that are not in the table give zeros, and are remembered: see `check`.
        """
        self._gather(windows, named)

    def _gather(self, windows: Windows, named: Tensor, *, without: Sequence[int] = ()) -> None:
        job = self._job.copy()
        job["law"], job["episodes"] = CHOSEN, self.placed.episodes.episodes
        job["chosen_episodes"], job["chosen_starts"] = named[0].data_ptr(), named[1].data_ptr()
        if len(named) > 2:
            job["chosen_lengths"] = named[2].data_ptr()
        self._launch(job, windows, without=without)

    def check(self) -> None:
        """Wait for the GPU, and raise ``SEGMENT_RANGE`` if a segment was not in the table."""
        wrong = int(self._ticket[1])
        if wrong:
            self._ticket[1] = 0
            raise InputError(
                "SEGMENT_RANGE",
                f"segment {wrong - 1} of a gather begins outside the table",
                remedy="use episodes of the table and starts below their lengths",
            )

    def allocate(self, shape: tuple[int, ...]) -> Windows:
        """Return uninitialised windows of leading shape `shape`."""
        whole = (*shape, self.context_length)

        def rows(group: ColumnGroup) -> tuple[int, ...]:
            return (*shape, self.context_length + group.history, group.width)

        def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        return Windows(
            buffers=tuple(
                empty(*rows(s.group), dtype=torch_dtype(s.group.final_dtype))
                for s in self.placed.groups
            ),
            fields=tuple(s.group.fields for s in self.placed.groups),
            timesteps=empty(*whole),
            attention_mask=empty(*whole),
            segments=empty(*shape, 2),
        )

    @property
    def long_stores(self) -> Sequence[int]:
        """Numbers of the groups that the copy engine serves where the host knows the segments."""
        return self._long.numbers

    def static(self, *, chances: bool = False, windows: Windows | None = None) -> StaticFill:
        """Return a fill of one step with memory and a step counter of its own.

        With `chances` it also writes the probability of each segment.  It fills `windows`, of the
        layout of `allocate`, if given.
        """
        if self.selection.gpu is None:
            raise UnavailableError(
                "DEVICE",
                f"the host draws the segments of strategy {self.selection.name!r}",
                remedy="use one that the GPU draws, or batches of the loader",
            )
        return StaticFill(self, chances=chances, windows=windows)

    def _tell_law(self, law: int) -> None:
        """Describe the law to the kernels."""
        assert self.selection.gpu is not None
        self._load(self._source)  # before masses move, which stay where they are
        self._job["rule"] = rule = describe_rule(
            self.selection.gpu,
            self.selection.index.offsets,
            arrays=self._arrays,
            make_tree=lambda masses: masses.on_device(self.device).tree,
        )
        if law == WEIGHTED_EPISODES:  # as the plain kernels find it
            self._job["thresholds"], self._job["episodes"] = rule["thresholds"], rule["size"]

    def _load(self, source: str) -> None:
        names = tuple(f"{source}_{suffix}" for suffix in (*KERNELS.values(), MANY))
        self._kernels |= load(f"{source}.cu", names, device=self.device.index or 0)

    def _row(self, placed: PlacedGroup) -> Any:
        field = placed.group.fields[0]
        moments = (0, 0)
        if field.mean is not None and field.divisor is not None:
            moments = (self._arrays.keep(field.mean), self._arrays.keep(field.divisor))
        return describe_group(
            placed.group,
            addresses=self._arrays.keep(placed.addresses),
            moments=moments,
            span=self.context_length,
        )

    def _lanes_of(self) -> int:
        """Threads of a task: no more than have something to do in the largest one."""
        busiest = 1
        for row in self._job["store"][0, : int(self._job["stores"][0])]:
            size = self.context_length * int(row["row_bytes"]) // int(row["unit"])
            busiest = max(busiest, min(size, int(row["piece"])))
        return next((lanes for lanes in KERNELS if busiest <= lanes), 32)

    def _fix(self, job: npt.NDArray[Any], windows: Windows) -> tuple[str, int]:
        """Write the outputs into the job; return the kernel and how many blocks it takes."""
        job["timesteps"] = windows.timesteps.data_ptr()
        job["mask"] = windows.attention_mask.data_ptr()
        job["names"] = windows.segments.data_ptr()
        for number, buffer in enumerate(windows.buffers):
            job["store"]["out"][0, number] = buffer.data_ptr()
        count = windows.segments.numel() // 2
        warps = self._most_blocks * THREADS // 32
        group = 0
        if self._row_sum * self.context_length <= LONG_BYTES or not self.placed.host_bytes:
            group = group_of(job, segments=count, warps=warps)
        job["segments"], job["group"] = count, group
        if group:
            return MANY, min(-(-count // (group * (THREADS // 32))), self._most_blocks)
        groups = THREADS // self._lanes
        blocks = min(-(-count * int(job["tasks"][0]) // groups), self._most_blocks)
        return KERNELS[self._lanes], blocks

    def _launch(
        self,
        job: npt.NDArray[Any],
        windows: Windows,
        *,
        source: str = FILL,
        without: Sequence[int] = (),
    ) -> None:
        kernel, blocks = self._fix(job, windows)
        if without:
            leave_out(job, without)
        if blocks:
            self._enqueue(f"{source}_{kernel}", blocks, Parameters(job.ctypes.data))

    def _enqueue(self, kernel: str, blocks: int, parameters: Parameters) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernels[kernel].launch(blocks, THREADS, stream, parameters)


class StaticFill:
    """One step's windows in memory that stays, filled for the step that a counter on the GPU says.

    Made for CUDA graphs: `enqueue` is one launch without host synchronisation, and every replay
    of it takes the next step.

    Attributes
    ----------
    windows
        (B, K, ...), overwritten by each fill.
    chances
        (B,) float64, the probability of each segment in its slot; None if not asked for.
    counter
        (1,) int64, the step that the next fill takes.
    """

    def __init__(
        self, engine: DeviceEngine, *, chances: bool = False, windows: Windows | None = None
    ) -> None:
        self._engine = engine
        self.windows = engine.allocate((engine.batch_size,)) if windows is None else windows
        self.chances: Tensor | None = None
        # counter, and tickets of its own: two of these may run on two streams
        self._state = torch.zeros(3, dtype=torch.int64, device=engine.device)
        self._job = engine._job.copy()
        self._job["counter"] = self._state.data_ptr()
        self._job["ticket"] = self._state.data_ptr() + 8
        self._job["wrong"] = self._state.data_ptr() + 16
        self.counter = self._state[:1]
        source = engine._source
        if chances:
            self.chances = torch.empty(engine.batch_size, dtype=torch.float64, device=engine.device)
            self._job["chances"], source = self.chances.data_ptr(), LAWS
            engine._load(LAWS)
        kernel, self._blocks = engine._fix(self._job, self.windows)
        self._kernel = f"{source}_{kernel}"
        self._parameters = Parameters(self._job.ctypes.data)

    def limit_blocks(self, blocks: int) -> None:
        """Leave multiprocessors to what runs beside this."""
        self._blocks = min(self._blocks, blocks)

    def set_step(self, step: int) -> None:
        """Make `step` the next one, in the order of torch's current stream."""
        self.counter.fill_(step)

    def enqueue(self) -> None:
        """Fill the windows of the counter's step and advance it by one."""
        self._engine._enqueue(self._kernel, self._blocks, self._parameters)
