"""The GPU's gather: one launch from (seed, step) to finished batches, wherever the rows lie.

An address for each episode and column group is all that the kernel knows of where rows are: in its
own memory, in another GPU's, in pinned host memory.  `kernels.gather` is the reference; both give
the same bits.  Nothing here waits for the GPU, unless it says so.

Shape legend: B segments a step, K steps of a window, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.types import Int64Array
from gear_offline.errors import UnavailableError
from gear_offline.kernels.columns import GroupAddresses
from gear_offline.kernels.cuda_module import DeviceArrays, Kernel, load, structure
from gear_offline.kernels.draws import HOST_DRAWN, PRIORITIES, WEIGHTS, GpuDraw, Segments
from gear_offline.kernels.gather import Padding, Windows, real_steps, torch_dtype

THREADS = 256
BLOCKS_PER_SM = 8  # more only waits
FILL = "fill"  # kernels for segments that the host draws, and for weights, which take few registers
SAMPLE = "sample"  # kernels for every way to draw
EACH, MANY = "each", "many"  # of both: a warp for each task of a window, or for many short windows
LIVE = "live.cu"  # all of them, of jobs that lie in GPU memory
LONG_BYTES = 1536  # from here on, a warp for each window reads host memory a little faster

COPY_PIECE_BYTES: Final = 4096  # of a task: one warp with 8 loads of 16 bytes a lane
CAST_PIECE: Final = 1024  # elements of a task

GROUP, JOB = structure("Group"), structure("Job")
MAX_GROUPS = JOB["group"].shape[0]
COPY = 0
_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TYPES: Final = {np.dtype(name): i for i, name in enumerate((*_FLOATS, *_INTEGERS), 1)}
TYPES[np.dtype(np.bool_)] = TYPES[np.dtype(np.uint8)]  # bytes 0 and 1


class GpuGather:
    """Fills windows on a GPU.

    Windows are cut from episodes at `offsets` (E + 1,), B segments a step (`rank_batch`).  The GPU
    draws by `draw`, from all episodes or the first ones, with `seed`, B slots of the global batch
    from `first_slot` on.  Without `draw` the host draws all segments.
    `reach` and `repeat` are those of `gear_offline.kernels.gather.CpuGather`.  With `behind` the
    GPU draws windows of so many steps, and these begin at the last real step of each.
    `reads_host`: some rows lie in host memory.  `reason`: why the rows lie where they do.  `keep`
    owns the memory that addresses point to.
    """

    def __init__(
        self,
        groups: Sequence[GroupAddresses],
        offsets: Int64Array,
        *,
        device: torch.device,
        context_length: int,
        rank_batch: int,
        padding: Padding = "right",
        draw: GpuDraw | None = None,
        seed: int = 0,
        first_slot: int = 0,
        global_batch: int | None = None,
        reads_host: bool = False,
        reason: str = "",
        keep: Any = None,
        reach: Int64Array | None = None,
        repeat: bool = False,
        behind: int = 0,
    ) -> None:
        self.groups, self.device = tuple(each.group for each in groups), device
        self.placed = tuple(groups)
        self.rank_batch, self.context_length, self.padding = rank_batch, context_length, padding
        self.lengths, self.reads_host, self.reason = np.diff(offsets), reads_host, reason
        self.reach = reach
        self._keep = [keep]
        self._launches = dict[int, tuple[str, int, int]]()  # by segments
        self.kernels = dict[str, Kernel]()
        way = HOST_DRAWN if draw is None else draw.way
        self.draws, self.has_chances = draw is not None, way == PRIORITIES
        self._source = FILL if way in (HOST_DRAWN, WEIGHTS) else SAMPLE
        self._load(FILL)
        if self._source == SAMPLE:
            self._load(SAMPLE)  # before masses move, which stay where they are
        if len(groups) > MAX_GROUPS:
            problem = f"{len(groups)} groups of columns, the GPU engine takes {MAX_GROUPS}"
            remedy = "name fewer extra columns, or use engine='off'"
            raise UnavailableError("DEVICE", problem, remedy=remedy)
        self._arrays = DeviceArrays(device)  # what addresses in the job point to
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._job = np.zeros(1, JOB)
        for number, each in enumerate(groups):
            self._job["group"][0, number] = self._describe(each)
        for name, value in {
            "seed": seed,
            "offsets": self._arrays.keep(offsets),
            "reach": 0 if reach is None else self._arrays.keep(reach),
            "episodes": len(self.lengths),
            "rank_batch": rank_batch,
            "first_slot": first_slot,
            "global_batch": global_batch or first_slot + rank_batch,
            "span": context_length,
            "left": int(padding == "left"),
            "repeat": int(repeat),
            "behind": behind,
            "ticket": self._ticket.data_ptr(),
            "groups": len(groups),
            "tasks": int(self._job["group"]["pieces"].sum()) + 1,
        }.items():
            self._job[name] = np.uint64(value)
        if draw is not None:
            self._job["sampling"] = self._describe_draw(draw)
        self._row_sum = sum(group.row_bytes for group in self.groups)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = BLOCKS_PER_SM * processors

    def land_in(self, ring: Sequence[Tensor]) -> None:
        """Count landing rows from the first of `ring`, of each group, in this GPU's memory.

        Before anything is launched or captured.
        """
        self._job["group"]["row_zero"][0, : len(ring)] = [rows.data_ptr() for rows in ring]
        self._keep.append(ring)

    def without_rows(self) -> GpuGather:
        """Return a gather of no columns that draws the same segments."""
        drawing = copy(self)
        drawing.groups = drawing.placed = ()
        drawing._job, drawing._launches, drawing._row_sum = self._job.copy(), {}, 0
        drawing._job["groups"], drawing._job["tasks"] = 0, 1
        return drawing

    def draw_and_gather(self, first_step: int, steps: int) -> Windows:
        """Return the windows that the GPU draws in consecutive steps, (steps, B, K, ...).

        One launch on torch's current stream, into new memory.
        """
        assert self.draws, "the host draws the segments"
        windows = self.allocate((steps, self.rank_batch))
        job = self._job.copy()
        job["first_step"] = first_step
        self._launch(job, windows, source=self._source)
        return windows

    def gather(self, segments: Segments, landing: Int64Array | None = None) -> Windows:
        """Return the windows of segments that the host drew, of any leading shape.

        `landing` is that of `gear_offline.kernels.gather.CpuGather.gather`, and so are the errors.
        """
        real_steps(segments, self.lengths, self.context_length)
        return self.gather_named(self.name(segments, landing).to(self.device, non_blocking=True))

    def name(self, segments: Segments, landing: Int64Array | None = None) -> Tensor:
        """Return segments as the kernel takes them, (*S, 4) int64, in pinned host memory."""
        pin = self.device.type == "cuda"
        names = torch.empty((*segments.shape, 4), dtype=torch.int64, pin_memory=pin)
        write_segments(names.view(-1, 4).numpy(), segments, landing, span=self.context_length)
        return names

    def gather_named(self, names: Tensor) -> Windows:
        """Return the windows of what `name` returned, brought to this GPU."""
        windows, job = self.allocate(names.shape[:-1]), self._job.copy()
        job["sampling"]["way"], job["chosen"] = HOST_DRAWN, names.data_ptr()
        self._launch(job, windows)
        return windows

    def allocate(self, shape: tuple[int, ...]) -> Windows:
        """Return uninitialised windows of leading shape `shape`."""
        span = self.context_length

        def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty((*shape, *size), dtype=dtype, device=self.device)

        return Windows(
            buffers=tuple(
                empty(span + group.history, group.width, dtype=torch_dtype(group.final_dtype))
                for group in self.groups
            ),
            fields=tuple(group.fields for group in self.groups),
            timesteps=empty(span),
            attention_mask=empty(span),
            segments=empty(2),
        )

    def _load(self, source: str) -> None:
        names = [f"{source}_{EACH}", f"{source}_{MANY}"]
        self.kernels |= load(f"{source}.cu", names, device=self.device.index or 0)

    def _describe(self, placed: GroupAddresses) -> Any:
        """Return the `Group` structure of a column group; `out` is set for each launch."""
        group, row = placed.group, np.zeros((), GROUP)
        final, field, keep = group.final_dtype, group.fields[0], self._arrays.keep
        span, row_bytes = self.context_length + group.history, group.row_bytes
        row["addresses"], row["row_zero"] = keep(placed.addresses), placed.row_zero
        row["row_bytes"], row["width"], row["history"] = row_bytes, group.width, group.history
        row["unit"] = unit = next(u for u in (16, 8, 4, 2, 1) if row_bytes % u == 0)
        if group.is_final:
            row["source"], row["piece"] = COPY, max(COPY_PIECE_BYTES // unit, 1)
            row["pieces"] = -(-span * row_bytes // unit // int(row["piece"]))
            return row
        if group.dtype not in TYPES or final not in (np.dtype(np.float32), np.dtype(np.int64)):
            problem = f"{field.name}: no cast from {group.dtype} to {final} on the GPU"
            raise UnavailableError("DEVICE", problem, remedy="use engine='off'")
        if field.mean is not None and field.divisor is not None:
            row["mean"], row["divisor"] = keep(field.mean), keep(field.divisor)
        row["source"], row["to_int64"] = TYPES[group.dtype], final == np.int64
        row["piece"], row["pieces"] = CAST_PIECE, -(-span * group.width // CAST_PIECE)
        return row

    def _describe_draw(self, draw: GpuDraw) -> Any:
        """Return the `Sampling` structure of a way to draw."""
        row, steps, keep = np.zeros((), JOB["sampling"]), int(draw.offsets[-1]), self._arrays.keep
        row["way"], row["size"] = draw.way, steps
        row["bits"] = max((steps - 1).bit_length(), 2)
        row["table"], row["guide"] = (
            keep(draw.search.table),
            keep(draw.search.guide.astype(np.int64)),
        )
        row["shift"], row["offsets"] = draw.search.shift, keep(draw.offsets)
        if draw.tree is not None:
            row["tree"] = draw.tree(self.device).tree
        return row

    def fix(self, job: npt.NDArray[Any], windows: Windows) -> tuple[str, int]:
        """Write the outputs into the job; return the kernel and how many blocks it takes."""
        job["timesteps"] = windows.timesteps.data_ptr()
        job["mask"] = windows.attention_mask.data_ptr()
        job["names"] = windows.segments.data_ptr()
        for number, buffer in enumerate(windows.buffers):
            job["group"]["out"][0, number] = buffer.data_ptr()
        count = windows.segments.numel() // 2
        if count not in self._launches:
            self._launches[count] = self._shape_launch(count)
        kernel, blocks, job["per_warp"] = self._launches[count]
        job["segments"] = count
        return kernel, blocks

    def _shape_launch(self, count: int) -> tuple[str, int, int]:
        """Return the kernel for a number of segments, its blocks, and segments of a warp or 0."""
        per_warp, warps = 0, THREADS // 32  # of a block
        rows = self._job["group"][0, : len(self.groups)]
        short = (rows["source"] == COPY) & (rows["pieces"] == 1) & (rows["unit"] >= 4)
        short &= (rows["history"] == 0) & (self._job["repeat"] == 0)
        long = self.reads_host and self._row_sum * self.context_length > LONG_BYTES
        if short.all() and not long:
            # Many windows a warp, but so that all warps are busy twice over.
            most = min(32, count // (2 * warps * self._most_blocks))
            per_warp = 1 << most.bit_length() - 1 if most else 0
        work = -(-count // per_warp) if per_warp else count * int(self._job["tasks"][0])
        return MANY if per_warp else EACH, min(-(-work // warps), self._most_blocks), per_warp

    def _launch(self, job: npt.NDArray[Any], windows: Windows, *, source: str = FILL) -> None:
        kernel, blocks = self.fix(job, windows)
        if blocks:
            self.kernels[f"{source}_{kernel}"].launch(blocks, THREADS, job)


class StaticFill:
    """Windows of one step in memory that stays; a counter on the GPU names the step.

    Made for CUDA graphs: `enqueue` is one launch without host synchronisation, and every replay
    of it takes the next step.  It fills `windows`, of the layout of `GpuGather.allocate`, if given,
    and with `chances` writes the probability of each segment.  With `ring` the host draws, and
    writes (`write`) segments of up to so many steps ahead to pinned memory that the kernel reads.
    A `live` one may go on with the rows of another engine (`adopt`).
    """

    def __init__(
        self,
        engine: GpuGather,
        *,
        chances: bool = False,
        windows: Windows | None = None,
        ring: int = 0,
        live: bool = False,
    ) -> None:
        self._engine = engine
        self.ring = ring  # steps whose segments the host writes ahead; 0 where the GPU draws
        self.windows = engine.allocate((engine.rank_batch,)) if windows is None else windows
        self.chances: Tensor | None = None  # (B,) float64, of each segment
        # counter, and a ticket of its own: two of these may run on two streams
        self._state = torch.zeros(2, dtype=torch.int64, device=engine.device)
        self.counter = self._state[:1]
        if ring:
            self._segments = torch.tensor([0, 0, 1, -1]).repeat(ring, engine.rank_batch, 1)
            if engine.device.type == "cuda":
                self._segments = self._segments.pin_memory()  # the GPU knows it by the same address
        elif chances:
            assert engine.has_chances, "those of priorities alone are computed on the GPU"
            self.chances = torch.empty(engine.rank_batch, dtype=torch.float64, device=engine.device)
        self._job, self._name, self._blocks = self._describe(engine)
        self._kernel = engine.kernels[self._name]
        self._live: Tensor | None = None
        if live:
            (self._kernel,) = load(LIVE, [self._name], device=engine.device.index or 0).values()
            self._live = torch.from_numpy(self._job.view(np.uint8)).to(engine.device)
            self._job = np.array([self._live.data_ptr()], np.uint64)

    def _describe(self, engine: GpuGather) -> tuple[npt.NDArray[Any], str, int]:
        """Return the job of an engine's rows, its kernel and how many blocks it takes."""
        job, source, address = engine._job.copy(), engine._source, self._state.data_ptr()
        job["counter"], job["ticket"] = address, address + 8
        if self.ring:
            job["sampling"]["way"], source = HOST_DRAWN, FILL
            job["chosen"], job["ring"] = self._segments.data_ptr(), self.ring
        elif self.chances is not None:
            job["chances"] = self.chances.data_ptr()
        kernel, blocks = engine.fix(job, self.windows)
        return job, f"{source}_{kernel}", blocks

    def adopt(self, engine: GpuGather) -> bool:
        """Go on with the rows of another engine, in graphs that are captured, too.

        Waits for the GPU.  False, and nothing is changed, where that takes another kernel.
        """
        if self._live is None:
            return False
        job, name, _ = self._describe(engine)
        if name != self._name:
            return False
        torch.cuda.synchronize(engine.device)
        self._live.copy_(torch.from_numpy(job.view(np.uint8)))
        self._engine = engine
        return True

    def limit_blocks(self, blocks: int) -> None:
        """Leave multiprocessors to concurrent kernels."""
        self._blocks = min(self._blocks, blocks)

    def set_step(self, step: int) -> None:
        """Make `step` the next one, in the order of torch's current stream."""
        self.counter.fill_(step)

    def write(self, first_step: int, segments: Segments, landing: Int64Array | None = None) -> None:
        """Write the (steps, B) segments of consecutive steps; no fill may still read their entries.

        `landing` is that of `gear_offline.kernels.gather.CpuGather.gather`, and so are the errors.
        """
        real_steps(segments, self._engine.lengths, self._engine.context_length)
        entries = (first_step + np.arange(segments.shape[0])) % self.ring
        records = np.empty((*segments.shape, 4), np.int64)
        write_segments(records.reshape(-1, 4), segments, landing, span=self._engine.context_length)
        self._segments.numpy()[entries] = records

    def enqueue(self) -> None:
        """Fill the windows of the counter's step and advance it by one."""
        self._kernel.launch(self._blocks, THREADS, self._job)


def write_segments(
    out: Int64Array, segments: Segments, landing: Int64Array | None, *, span: int
) -> None:
    """Write (n, 4) rows: episode, start, steps of the window at most, landing row or -1."""
    out[:, 0], out[:, 1] = segments.episodes.reshape(-1), segments.starts.reshape(-1)
    out[:, 2] = span if segments.lengths is None else segments.lengths.reshape(-1)
    out[:, 3] = -1 if landing is None else landing.reshape(-1)
