"""Priorities in GPU memory: masses, their sums, and updates from losses.

The reference is `sampling.masses`: masses, sums and draws are the same bits.  `update` waits
for nothing and can be captured; what returns numbers of Python or NumPy waits for the GPU.

Shape legend: N steps (items), E episodes, B segments of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.text import size_text
from gear_offline.core.types import Int64Array, UInt64Array
from gear_offline.errors import GearError
from gear_offline.kernels.cuda_module import load, structure

FAN: Final = 16
THREADS: Final = 1024  # of the one block that updates
STATE_WORDS: Final = 2
UPDATES, PAUSED = range(STATE_WORDS)

UPDATE = structure("UpdateJob")


class DevicePriorities:
    """The masses of N items in GPU memory, 8.53 bytes each with their sums.

    `offsets` (E + 1,) are those of the episodes, `mass_of_code` (CODES,) as of `sampling.masses`,
    `first` is the mass of every step.  `tree` is a `Tree` whose addresses never change.
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
        (self._update,) = load("tree.cu", ["tree_update"], device=device.index or 0).values()
        self._levels = _allocate(level_sizes(self.steps), device)
        self.tree: Any = np.zeros((), UPDATE["tree"])
        self.tree["levels"] = count = len(self._levels)
        self.tree["level"][:count] = [level.data_ptr() for level in self._levels]
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self._offsets = torch.from_numpy(np.array(offsets)).to(device)
        self._mass_of_code = torch.from_numpy(mass_of_code.view(np.int64)).to(device)
        self._job = np.zeros(1, UPDATE)
        self._job["tree"], self._job["episodes"] = self.tree, len(offsets) - 1
        self._job["offsets"] = self._offsets.data_ptr()
        self._job["masses"] = self._mass_of_code.data_ptr()
        self._job["state"] = self._state.data_ptr()
        self.masses.fill_(first)
        self.add_up()

    @property
    def masses(self) -> Tensor:
        """(N,) int64, a view; call `add_up` after writing to it.  All together below ``2**63``."""
        return self._levels[0][: self.steps]

    @property
    def updates(self) -> int:
        """Updates so far."""
        return int(self._state[UPDATES])

    @property
    def total(self) -> int:
        """Sum of all masses."""
        return int(self._levels[-1].sum())

    def add_up(self) -> None:
        """Compute all sums anew."""
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            torch.sum(below.view(-1, FAN), 1, out=sums[: len(below) // FAN])

    def find(self, numbers: UInt64Array) -> Int64Array:
        """Find the item whose range holds each number below `total`, int64."""
        remainders = torch.from_numpy(numbers.view(np.int64)).to(self.device)
        items = torch.zeros_like(remainders)
        for level in reversed(self._levels):
            masses = level.view(-1, FAN)[items]
            passed = remainders[..., None] >= masses.cumsum(-1)
            remainders = remainders - (masses * passed).sum(-1)
            items = items * FAN + passed.sum(-1)
        return np.asarray(items.cpu().numpy())

    def masses_of(self, rows: Int64Array) -> Int64Array:
        """Return the masses of rows, of any shape."""
        masses = self.masses[torch.from_numpy(np.array(rows)).to(self.device)]
        return np.asarray(masses.cpu().numpy())

    def update(self, names: Tensor, losses: Tensor) -> None:
        """Take the losses of segments; the larger one counts where a segment is named twice.

        (B, 2) names, episode and start, and (B,) losses, on the GPU.  If a loss is not finite or
        negative, or a segment not in the table, nothing is changed.
        """
        count = losses.numel()
        assert names.numel() == 2 * count and names.is_contiguous() and losses.is_contiguous()
        assert names.dtype == torch.int64 and losses.dtype == torch.float32
        job = self._job.copy()
        job["names"], job["losses"], job["count"] = names.data_ptr(), losses.data_ptr(), count
        self._update.launch(1, min(THREADS, -(-max(count, 1) // 32) * 32), job)

    def update_from_host(self, segments: Int64Array, losses: npt.NDArray[np.float32]) -> None:
        """`update` of names and losses in host memory."""
        names = torch.from_numpy(np.array(segments, dtype=np.int64))
        values = torch.from_numpy(np.array(losses, dtype=np.float32))
        self.update(names.to(self.device), values.to(self.device))

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Leave out updates that are enqueued inside; those in captured graphs, too."""
        self._state[PAUSED].fill_(1)
        try:
            yield
        finally:
            self._state[PAUSED].fill_(0)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return masses (N,) int64 and the number of updates (1,) int64."""
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


def _allocate(sizes: list[int], device: torch.device) -> list[Tensor]:
    try:
        return [torch.zeros(size, dtype=torch.int64, device=device) for size in sizes]
    except torch.OutOfMemoryError as error:
        problem = f"the priorities of {sizes[0]:,} steps need {size_text(8 * sum(sizes))} of GPU "
        problem += f"memory, {size_text(torch.cuda.mem_get_info(device)[0])} are free"
        remedy = "use engine='off', or another strategy"
        raise GearError("MEMORY", problem, remedy=remedy) from error


def level_sizes(items: int) -> list[int]:
    """Return the length of each level, items first; all are multiples of `FAN`, the last is `FAN`.

    Together about 1.067 words an item.
    """
    sizes = [-(-items // FAN) * FAN]
    while sizes[-1] > FAN:
        sizes.append(-(-(sizes[-1] // FAN) // FAN) * FAN)
    return sizes
