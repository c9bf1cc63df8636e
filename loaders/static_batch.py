"""A batch that stays in GPU memory and is filled in place: for steps captured as CUDA graphs.

Shape legend: B segments, K steps of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.kernels.gather import Padding, Windows
from gear_offline.kernels.gather_gpu import GpuGather, StaticFill
from gear_offline.loaders.batch import Batch, split_steps

if TYPE_CHECKING:
    from gear_offline.distributed.world import World
    from gear_offline.loaders.chunks import ExtraGather
    from gear_offline.loaders.segments import LocalSegments, ShardedSegments

AHEAD_BYTES = 8 << 20  # of a batch from host memory: smaller ones are there in no time
AHEAD_BLOCKS = 32  # they keep the bus busy and leave the multiprocessors to the model


class StaticBatch:
    """The next batch, made by the GPU on its own.

    Before each step the host calls `prepare`, which draws where the GPU does not.  The rest is
    captured: `begin` (draw, locate and gather in one kernel), whatever uses `batch`, whose tensors
    stay where they are, and `end`.

    With `ahead` the rows of the following step travel on a stream of their own during a step, where
    that pays.  They come into memory of their own, from which `begin` copies them.  Batches of a
    sampler that learns from losses (`learns`) have probabilities and never travel ahead.

    The batch, its goals and its chunks lie in `windows` if given, of the layout of
    `GpuGather.allocate`.  Where the engine does not draw, `writer` draws segments on the host, and
    those of `extra_gathers` too.  The engine of a `live` batch may change: `adopt`.
    """

    def __init__(
        self,
        engine: GpuGather,
        *,
        padding: Padding,
        step: int,
        ahead: bool = False,
        learns: bool = False,
        task_bounds: Tensor | None = None,
        windows: Sequence[Windows] = (),
        writer: SegmentWriter | None = None,
        extra_gathers: Sequence[tuple[ExtraGather, GpuGather]] = (),
        live: bool = False,
    ) -> None:
        self._writer, ring = writer, 0 if writer is None else writer.ring
        engines = [engine, *(gather for _, gather in extra_gathers)]
        targets: Any = windows or [None] * len(engines)
        fills = [
            StaticFill(
                each, chances=learns and each is engine, windows=target, ring=ring, live=live
            )
            for each, target in zip(engines, targets, strict=True)
        ]
        batch_bytes = sum(buffer.nbytes for buffer in fills[0].windows.buffers)
        self.ahead = ahead and engine.reads_host and batch_bytes >= AHEAD_BYTES
        self._windows = [each.windows for each in fills]
        if self.ahead:  # what travels needs memory of its own
            if windows:
                fills = [StaticFill(each, ring=ring, live=live) for each in engines]
            else:
                self._windows = [each.map(torch.empty_like) for each in self._windows]
            for each in fills:
                each.limit_blocks(AHEAD_BLOCKS)
        self._fills = fills
        first_windows, *more = (each.map(lambda t: t[None]) for each in self._windows)
        (self.batch,) = split_steps(
            first_windows, padding, task_bounds, _extras(extra_gathers, more)
        )
        self._stream: Any = None
        if self.ahead:
            device = self.batch.device
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._marks: list[Any] = [
                torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
                for _ in range(4)
            ]
        self.set_step(step)

    @property
    def chances(self) -> Tensor | None:
        """(B,) float64, of each segment; None unless the sampler learns."""
        return self._fills[0].chances

    @property
    def counter(self) -> Tensor:
        """(1,) int64 on the GPU, the step that the next `begin` takes."""
        return self._fills[0].counter

    def set_step(self, step: int) -> None:
        """Make `step` the next one, in the order of torch's current stream."""
        for fill in self._fills:
            fill.set_step(step)
        self._coming = step
        if self.ahead:
            self.prepare()
            self._fill()

    def _fill(self) -> None:
        for fill in self._fills:
            fill.enqueue()

    def adopt(self, engine: GpuGather, writer: SegmentWriter | None, *, step: int) -> bool:
        """Go on at `step` with the rows of another engine; captured graphs stay valid.

        Waits for the GPU.  False, and nothing is changed, where a capture must be made anew.
        """
        if len(self._fills) > 1 or not self._fills[0].adopt(engine):
            return False
        self._writer = writer
        self.set_step(step)
        return True

    def prepare(self) -> None:
        """Write the next step's segments if the host draws; once before each `begin` or replay."""
        if self._writer is not None:
            self._writer.write(self._fills, self._coming)
        self._coming += 1

    def begin(self, *, timed: bool = False) -> None:
        """Put the next step into `batch`, and advance: launches, no waiting.

        Runs on torch's current stream.  Captured in a CUDA graph, each replay takes one step more.
        """
        if not self.ahead:
            self._fill()
            return
        self._mark(0, timed)
        for windows, fill in zip(self._windows, self._fills, strict=True):
            for target, fetched in zip(_tensors(windows), _tensors(fill.windows), strict=True):
                target.copy_(fetched)
        self._mark(1, timed)
        self._stream.wait_stream(torch.cuda.current_stream(self.batch.device))
        with torch.cuda.stream(self._stream):
            self._fill()

    def end(self, *, timed: bool = False) -> None:
        """Make torch's current stream wait for the rows fetched ahead."""
        if not self.ahead:
            return
        self._mark(2, timed)
        torch.cuda.current_stream(self.batch.device).wait_stream(self._stream)
        self._mark(3, timed)

    def enqueue(self) -> None:
        """`begin` and `end`: for whoever has nothing to do meanwhile."""
        self.begin()
        self.end()

    def waited_seconds(self) -> float:
        """Return the GPU seconds that the last timed step, already done, spent on its batch."""
        first, second, third, fourth = self._marks
        milliseconds: float = first.elapsed_time(second) + third.elapsed_time(fourth)
        return milliseconds / 1e3

    def _mark(self, number: int, timed: bool) -> None:
        if timed:
            self._marks[number].record()


class SegmentWriter:
    """Draws blocks of steps on the host, and writes them to where a `StaticFill` reads them.

    The fill's ring holds two blocks.  When a block begins, the one before it may still be read;
    that before the last has been read when an event has come that was recorded a block ago.
    """

    def __init__(
        self,
        segments: LocalSegments | ShardedSegments,
        block_steps: int,
        world: World,
        extra_gathers: Sequence[ExtraGather] = (),
    ) -> None:
        self._segments, self._block_steps, self._world = segments, block_steps, world
        self._extra_gathers = extra_gathers
        self.ring = 2 * block_steps
        self._first = self._end = -1
        self._before: Any = None

    def write(self, fills: Sequence[StaticFill], step: int) -> None:
        """Return when the segments of `step` are written, each extra gather's to its own fill."""
        if self._first <= step < self._end:
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(fills[0].counter.device))
        if step != self._end:
            self._world.wait_for_gpu(event)  # the entries of any step may be written
        elif self._before is not None:
            self._world.wait_for_gpu(self._before)
        self._before = event
        self._segments.release(event)
        block = self._segments.draw(step, self._block_steps)
        fills[0].write(step, block.segments, block.landing)
        for fill, extra in zip(fills[1:], self._extra_gathers, strict=True):
            fill.write(step, extra.draw(step, block.segments))
        self._first, self._end = step, step + self._block_steps


def side_by_side(
    engine: GpuGather,
    extra_gathers: Sequence[tuple[ExtraGather, GpuGather]],
    count: int,
    padding: Padding,
) -> tuple[list[list[Windows]], Batch]:
    """Return windows for `count` batches that lie one after another, and all as one batch.

    `engine` gathers the windows of a batch, `extra_gathers` what goes with them.
    """
    engines, size = [engine, *(gather for _, gather in extra_gathers)], engine.rank_batch
    blocks = [engine.allocate((count * size,)) for engine in engines]
    slices = [
        [block.map(lambda t, n=n: t[n * size : (n + 1) * size]) for block in blocks]  # type: ignore[misc]
        for n in range(count)
    ]
    first, *more = (block.map(lambda t: t[None]) for block in blocks)
    (batch,) = split_steps(first, padding, None, _extras(extra_gathers, more))
    return slices, batch


def _extras(
    extra_gathers: Sequence[tuple[ExtraGather, GpuGather]], gathered: Sequence[Windows]
) -> dict[str, Tensor]:
    """Return the tensors of extra gathers, by the names of extras."""
    extras = dict[str, Tensor]()
    for (extra, _), windows in zip(extra_gathers, gathered, strict=True):
        extras |= extra.tensors(windows)
    return extras


def _tensors(windows: Windows) -> tuple[Tensor, ...]:
    return (*windows.buffers, windows.timesteps, windows.attention_mask, windows.segments)
