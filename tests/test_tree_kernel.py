"""The tree's kernel text, compiled for the CPU: exact sums, every edge between two masses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.kernels.priorities import DevicePriorities
from gear_offline.sampling.prioritized import code_of
from tests.kernels_on_cpu import compile_kernels, on_cpu
from tests.sampling_support import prioritized


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(tmp_path_factory.mktemp("tree"))


def tree_of(library: Any, masses: list[int] | npt.NDArray[np.int64]) -> DevicePriorities:
    values = np.asarray(masses, dtype=np.int64)
    codes = np.ones(16, dtype=np.uint64)
    with on_cpu(library) as device:
        tree = DevicePriorities(np.array([0, len(values)]), codes, device=device, first=1)
        tree.load_state(values, 0)
    return tree


def find(library: Any, tree: DevicePriorities, numbers: list[int]) -> list[int]:
    asked = np.array(numbers, dtype=np.uint64)
    found = np.empty(len(asked), dtype=np.int64)
    row = np.array([tree.tree])
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (row, asked, found)]
    library.tree_find(addresses[0], addresses[1], ctypes.c_longlong(len(asked)), addresses[2])
    return found.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=700).filter(any),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
)
def test_it_finds_what_a_list_of_cumulative_sums_finds(
    library: Any, masses: list[int], numbers: list[int]
) -> None:
    tree = tree_of(library, masses)
    bounds = np.cumsum(np.array(masses, dtype=object)).tolist()
    assert tree.total == bounds[-1]
    asked = sorted({n % bounds[-1] for n in numbers} | {0, bounds[-1] - 1})
    asked += [b - d for b in bounds for d in (0, 1) if 0 <= b - d < bounds[-1]]
    assert find(library, tree, asked) == [
        int(np.searchsorted(np.array(bounds, dtype=np.int64), n, side="right")) for n in asked
    ]


LENGTHS = [5, 1, 40, 3, 300, 17]
NAMES = np.array([(e, s) for e, n in enumerate(LENGTHS) for s in range(n)], dtype=np.int64)
PAIRS = st.lists(
    st.tuples(st.integers(0, len(NAMES) - 1), st.floats(0, 2.0**100, width=32)), max_size=60
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=4), st.sampled_from([0.0, 0.6, 2.0]))
def test_updates_are_those_of_the_reference_in_any_order(
    library: Any, batches: list[list[tuple[int, float]]], alpha: float
) -> None:
    sampler, other, reference = (prioritized(LENGTHS, alpha=alpha) for _ in range(3))
    with on_cpu(library) as device:
        trees = [some.on_device(device) for some in (sampler, other)]
        for pairs in batches:
            names = NAMES[[row for row, _ in pairs]].reshape(-1, 2)
            losses = np.array([loss for _, loss in pairs], dtype=np.float32)
            trees[0].update_from_host(names, losses)
            trees[1].update_from_host(names[::-1], losses[::-1])
            reference.update(names, losses)
        assert sampler.masses.tolist() == other.masses.tolist() == reference.masses.tolist()
        assert trees[0].total == int(reference.masses.sum())
        assert sampler.updates == reference.updates == len(batches)
        sums = [level.clone() for level in trees[0]._levels]
        trees[0].add_up()
        assert all(torch.equal(a, b) for a, b in zip(sums, trees[0]._levels, strict=True))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *(((2, 5), bad) for bad in (np.nan, np.inf, -np.inf, -1e-30)),
        *((name, 1.0) for name in ((-1, 0), (6, 0), (2, 40), (2, -1), (0, 2**62), (2**62, 0))),
    ],
)
def test_a_batch_that_is_refused_changes_nothing(
    library: Any, name: tuple[int, int], loss: float
) -> None:
    sampler = prioritized(LENGTHS)
    with on_cpu(library) as device:
        tree = sampler.on_device(device)
        before = [level.clone() for level in tree._levels]
        names = np.array([(4, 7), name, (0, 0)], dtype=np.int64)
        tree.update_from_host(names, np.array([0.5, loss, 2.0], dtype=np.float32))
        assert all(torch.equal(a, b) for a, b in zip(before, tree._levels, strict=True))
        assert (tree.updates, tree.refused) == (0, 1)
        tree.update_from_host(names[:1], np.array([-0.0], dtype=np.float32))
        assert (tree.updates, tree.refused) == (1, 1)
        row = sum(LENGTHS[:4]) + 7
        assert int(sampler.masses[row]) == sampler.mass_of_code[code_of(np.zeros(1, np.float32))[0]]
