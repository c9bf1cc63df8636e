"""What selections and windows may look at: nothing that comes later, but for returns.

A selection sees the lengths of episodes and, if it asks, whether they were terminated and their
returns; a sampler that learns sees the losses of batches before.  Position t of a window holds what
happened at step t, and its return-to-go.  So a table whose later steps are replaced, with the same
returns, gives the same segments, and the same values wherever a window shows earlier steps.
"""

from typing import Any

import numpy as np
import pytest

from gear_offline.kernels.gather import Padding
from gear_offline.sampling import Facts, make_sampler
from gear_offline.tables.table import Table, TableOptions, build_table
from tests.kernels_on_cpu import compile_kernels, gpu_gather, on_cpu
from tests.sampling_support import CASES
from tests.segment_oracle import MemoryTable, cpu_gather

LENGTHS = [9, 1, 14, 6, 2, 11]
SPAN, BATCH, STEPS = 5, 6, 8
CUT = 4  # steps from here on are replaced


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(tmp_path_factory.mktemp("future"))


def columns(*, replaced: bool) -> dict[str, Any]:
    """Whole rewards, so that sums are exact; the later ones change their order."""
    generator = np.random.default_rng(5)
    found: dict[str, Any] = {
        "observations": generator.normal(size=(sum(LENGTHS), 3)).astype(np.float32),
        "actions": generator.normal(size=(sum(LENGTHS), 2)).astype(np.float32),
        "rewards": generator.integers(-50, 50, size=sum(LENGTHS)).astype(np.float64),
    }
    if replaced:
        begin = 0
        for length in LENGTHS:
            later = slice(begin + CUT, begin + length)
            found["observations"][later] += 1e3
            found["actions"][later] *= -7
            found["rewards"][later] = found["rewards"][later][::-1].copy()
            begin += length
    return found


def table_of(values: dict[str, Any]) -> Table:
    return build_table(MemoryTable(values, LENGTHS), TableOptions(context_length=SPAN))


def sampler_of(values: dict[str, Any], name: str, options: dict[str, Any]) -> Any:
    index = table_of(values).episodes
    ends = np.cumsum(LENGTHS)
    returns = np.array([part.sum() for part in np.split(values["rewards"], ends[:-1])])
    data = Facts(
        episodes=index,
        returns=returns,
        terminated=np.array([True, True, False, True, True, False]),
        column=lambda name: np.arange(index.steps) % 3,
    )
    return make_sampler(name, data, context_length=SPAN, **options)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("engine", [False, True])
def test_later_steps_change_nothing_before_them(
    library: Any, name: str, options: dict[str, Any], engine: bool
) -> None:
    shown: list[Any] = []
    for replaced in (False, True):
        values = columns(replaced=replaced)
        table, sampler = table_of(values), sampler_of(values, name, options)
        padding: Padding = sampler.padding or "right"
        if engine:
            with on_cpu(library):
                made = gpu_gather(
                    table, sampler, seed=3, rank_batch=BATCH, context_length=SPAN, padding=padding
                )
                if made.draws:
                    windows = made.draw_and_gather(11, STEPS)
                else:
                    windows = made.gather(sampler.sample(3, 11, STEPS, BATCH))
        else:
            drawn = sampler.sample(3, 11, STEPS, BATCH)
            gather = cpu_gather(table, context_length=SPAN, padding=padding)
            windows = gather.gather(drawn)
        shown.append({**windows.tensors(), "names": windows.segments,
                      "timesteps": windows.timesteps, "mask": windows.attention_mask})  # fmt: skip
    one, other = shown
    for key in ("names", "timesteps", "mask"):
        assert one[key].numpy().tobytes() == other[key].numpy().tobytes(), key
    early = ((one["timesteps"] < CUT) & (one["mask"] != 0)).numpy()
    late = ((one["timesteps"] >= CUT) & (one["mask"] != 0)).numpy()
    assert early.any()
    for key in ("states", "actions", "rewards", "returns_to_go"):
        before, after = one[key].numpy(), other[key].numpy()
        assert before[early].tobytes() == after[early].tobytes(), key
    if late.any():
        assert not np.array_equal(one["states"].numpy()[late], other["states"].numpy()[late])
