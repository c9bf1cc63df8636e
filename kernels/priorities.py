"""Priorities in GPU memory: masses, their sums, updates from losses, importance weights.

The reference is `sampling.prioritized`: masses, sums and draws are the same bits.
Nothing here waits for the GPU but `state` and `total`.

Shape legend: N steps (items), E episodes, B segments of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.text import size_text
from gear_offline.core.types import Int64Array
from gear_offline.errors import GearError
from gear_offline.kernels.cuda_module import Function, Parameters, load
from gear_offline.kernels.draws import TREE

FAN: Final = 16
STATE_WORDS: Final = 4
UPDATES, REFUSED, WRONG, PAUSED = range(STATE_WORDS)

# `UpdateJob`, `ImportanceJob` and `SumsJob` of cuda/tree.cuh.
UPDATE = np.dtype(
    [
        ("tree", TREE),
        *((name, np.uint64) for name in ("names", "losses")),
        ("count", np.int64),
        ("offsets", np.uint64),
        ("episodes", np.int64),
        *((name, np.uint64) for name in ("masses", "state")),
    ]
)
IMPORTANCE = np.dtype(
    [
        *((name, np.uint64) for name in ("probability", "weights")),
        *((name, np.int64) for name in ("count", "size")),
        ("counter", np.uint64),
        ("beta", np.float64),
        ("beta_steps", np.int64),
    ]
)
SUMS = np.dtype([("below", np.uint64), ("sums", np.uint64), ("count", np.int64)])

THREADS, BLOCK = 256, 1024
SMALL = 8192  # updates that one block does in one launch
BLOCKS_PER_SM = 4
KERNELS = ("tree_sums", "tree_update", "tree_check", "tree_apply", "tree_release", "tree_weigh")


class DevicePriorities:
    """The masses of N items in GPU memory, 8.53 bytes each with their sums.

    `offsets` (E + 1,) are those of the episodes, `mass_of_code` (CODES,) is that of `Prioritized`,
    `first` the mass of every step.  `tree` is a `TREE` row whose addresses never change.
    """

    def __init__(
        self,
        offsets: Int64Array,
        mass_of_code: npt.NDArray[np.uint64],
        *,
        device: torch.device,
        first: int,
    ) -> None:
        self.device, self.steps = device, int(offsets[-1])
        self._kernels: dict[str, Function] = load("tree.cu", KERNELS, device=device.index or 0)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = BLOCKS_PER_SM * processors
        self._levels = _allocate(level_sizes(self.steps), device)
        self.tree = describe_tree([level.data_ptr() for level in self._levels])
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self._offsets = torch.from_numpy(np.array(offsets)).to(device)
        self._mass_of_code = torch.from_numpy(mass_of_code.view(np.int64)).to(device)
        self._job = job_of(
            UPDATE,
            tree=self.tree,
            offsets=self._offsets.data_ptr(),
            episodes=len(offsets) - 1,
            masses=self._mass_of_code.data_ptr(),
            state=self._state.data_ptr(),
        )
        self.masses.fill_(first)
        self.add_up()

    @property
    def masses(self) -> Tensor:
        """(N,) int64, a view; call `add_up` after writing to it.  All together below ``2**63``."""
        return self._levels[0][: self.steps]

    @property
    def updates(self) -> int:
        """Updates so far; waits for the GPU."""
        return int(self._state[UPDATES])

    @property
    def total(self) -> int:
        """Sum of all masses; waits for the GPU."""
        return int(self._levels[-1].sum())

    def add_up(self) -> None:
        """Compute all sums anew."""
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            count = len(below) // 16
            job = job_of(SUMS, below=below.data_ptr(), sums=sums.data_ptr(), count=count)
            self._launch("tree_sums", job, items=count)

    def update(self, names: Tensor, losses: Tensor) -> None:
        """Take the losses of segments.  Of a segment that is named twice the larger one counts.

        (B, 2) names, episode and start, and (B,) losses, on the GPU.  Nothing waits.  If a loss is
        not finite or negative, or a segment not in the table, nothing is changed.
        """
        count = losses.numel()
        assert names.numel() == 2 * count and names.is_contiguous() and losses.is_contiguous()
        assert names.dtype == torch.int64 and losses.dtype == torch.float32
        job = self._job.copy()
        job["names"], job["losses"], job["count"] = names.data_ptr(), losses.data_ptr(), count
        if count <= SMALL:
            self._launch("tree_update", job, items=1, threads=_threads(count))
            return
        for kernel in ("tree_check", "tree_apply", "tree_release"):
            self._launch(kernel, job, items=count)

    def update_from_host(self, segments: Int64Array, losses: npt.NDArray[np.float32]) -> None:
        """`update` of names and losses in host memory."""
        names = torch.from_numpy(np.array(segments, dtype=np.int64))
        values = torch.from_numpy(np.array(losses, dtype=np.float32))
        self.update(names.to(self.device), values.to(self.device))

    def masses_of(self, rows: Int64Array) -> Int64Array:
        """Return the masses of rows, of any shape; waits for the GPU."""
        masses = self.masses[torch.from_numpy(np.array(rows)).to(self.device)]
        return np.asarray(masses.cpu().numpy())

    def importance(
        self,
        probability: Tensor,
        *,
        counter: Tensor,
        beta: float,
        beta_steps: int | None,
        out: Tensor,
    ) -> None:
        """Write (B,) float32 weights of losses into `out`, within a unit in the last place.

        `probability` (B,) float64 is that of the slots, `counter` (1,) one more than the step.
        """
        count = out.numel()
        assert probability.dtype == torch.float64 and out.dtype == torch.float32
        job = job_of(
            IMPORTANCE,
            probability=probability.data_ptr(),
            weights=out.data_ptr(),
            count=count,
            size=self.steps,
            counter=counter.data_ptr(),
            beta=beta,
            beta_steps=beta_steps or 0,
        )
        self._launch("tree_weigh", job, items=1, threads=_threads(count))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out updates that are enqueued inside; those in captured graphs, too."""
        self._state[PAUSED].fill_(1)
        try:
            yield
        finally:
            self._state[PAUSED].fill_(0)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return masses (N,) int64 and the number of updates (1,) int64; waits for the GPU."""
        return {
            "masses": self.masses.to("cpu", copy=True).numpy(),
            "updates": self._state[UPDATES : UPDATES + 1].to("cpu", copy=True).numpy(),
        }

    def load_state(self, masses: Int64Array, updates: int) -> None:
        """Take over masses and the number of updates; addresses stay."""
        self.masses.copy_(torch.from_numpy(masses))
        self._state.zero_()
        self._state[UPDATES].fill_(updates)
        self.add_up()

    def take_over(self, before: DevicePriorities, finer: int) -> None:
        """Take over the masses of fewer items, divided by `finer`, and the number of updates.

        Nothing waits.  The memory of both is held until `before` is let go.
        """
        first = self.masses[: before.steps].copy_(before.masses)
        if finer > 1:
            first.floor_divide_(finer).clamp_(min=1)
        self._state.zero_()
        self._state[UPDATES].copy_(before._state[UPDATES])
        self.add_up()

    def _launch(
        self, kernel: str, job: npt.NDArray[Any], *, items: int, threads: int = THREADS
    ) -> None:
        blocks = max(1, min(-(-items // threads), self._most_blocks))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernels[kernel].launch(blocks, threads, stream, Parameters(job.ctypes.data))


def _allocate(sizes: list[int], device: torch.device) -> list[Tensor]:
    try:
        return [torch.zeros(size, dtype=torch.int64, device=device) for size in sizes]
    except torch.OutOfMemoryError as error:
        raise GearError(
            "MEMORY",
            f"the priorities of {sizes[0]:,} steps need {size_text(8 * sum(sizes))} of GPU "
            f"memory, {size_text(torch.cuda.mem_get_info(device)[0])} are free",
            remedy="use engine='off', or another strategy",
        ) from error


def level_sizes(items: int) -> list[int]:
    """Return the length of each level, items first; all are multiples of `FAN`, the last is `FAN`.

    Together about 1.067 words an item.
    """
    sizes = [-(-items // FAN) * FAN]
    while sizes[-1] > FAN:
        sizes.append(-(-(sizes[-1] // FAN) // FAN) * FAN)
    return sizes


def describe_tree(levels: Sequence[int]) -> Any:
    """Return a `TREE` row of the addresses of the levels."""
    row = np.zeros((), TREE)
    row["level"][: len(levels)] = levels
    row["levels"] = len(levels)
    return row


def job_of(dtype: np.dtype[Any], **values: Any) -> npt.NDArray[Any]:
    """Return one job of shape (1,); unnamed values are zero."""
    job = np.zeros(1, dtype)
    for name, value in values.items():
        job[name] = value
    return job


def _threads(count: int) -> int:
    return min(BLOCK, -(-max(count, 1) // 32) * 32)
