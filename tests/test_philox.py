"""Random numbers: NumPy's Philox, whatever the chunking, on the CPU and in the CUDA text."""

import ctypes
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gear_offline.kernels.draws import bounded, draws
from gear_offline.kernels.short_attention import philox4x32

DRAW = st.integers(0, 2**64 - 1)


@settings(max_examples=150)
@given(DRAW, st.integers(0, 9), st.integers(0, 2**63) | st.integers(0, 99), st.integers(1, 40))
@example(2**64 - 1, 3, 2**63, 2)
@example(0, 0, 2**32, 2**20 + 1)  # beyond 64 bits of flat slot numbers only if they were cut
def test_every_slot_has_its_place_in_the_stream(
    kernels: Any, seed: int, stream: int, step: int, count: int
) -> None:
    """Flat slot f takes numbers 2 f and 2 f + 1 of `numpy.random.Philox(key=(seed, stream))`."""
    first, second = draws(seed=seed, stream=stream, first_step=step, steps=3, count=count)
    assert first.shape == second.shape == (3, count) and first.dtype == np.uint64
    alone = draws(seed=seed, stream=stream, first_step=step + 1, steps=1, count=count)
    assert np.array_equal(first[1], alone[0][0]) and np.array_equal(second[1], alone[1][0])
    flat = (step + 2) * count + count - 1
    numpy = np.random.Philox(key=seed | stream << 64, counter=flat // 2)
    pair = numpy.random_raw(4).tolist()[2 * (flat % 2) :][:2]
    assert [int(first[2, -1]), int(second[2, -1])] == pair
    out = np.empty((3, count, 2), dtype=np.uint64)
    arguments = [ctypes.c_ulonglong(number) for number in (seed, stream, step, 3, count)]
    kernels.library.draw_all(*arguments, ctypes.c_void_p(out.ctypes.data))
    assert np.array_equal(out[..., 0], first) and np.array_equal(out[..., 1], second)


@settings(max_examples=300)
@given(st.lists(DRAW, min_size=1, max_size=8), st.integers(1, 2**63 - 1))
@example([2**64 - 1], 2**63 - 1)
@example([2**64 - 1], 2**32 - 1)
@example([2**64 - 1], 2**32)
@example([2**64 - 1, 0], 1)
def test_bounded_is_the_high_half_of_the_product(draw: list[int], n: int) -> None:
    numbers = np.array(draw, dtype=np.uint64)
    values = bounded(numbers, n)
    assert values.dtype == np.int64 and values.tolist() == [r * n // 2**64 for r in draw]
    sizes = np.array([n, 7, 2**33, 2**62] * len(draw), dtype=np.int64)[: len(draw)]
    assert bounded(numbers, sizes).tolist() == [
        r * int(size) // 2**64 for r, size in zip(draw, sizes, strict=True)
    ]


def test_words_of_dropout() -> None:
    """Random123's kat_vectors for philox4x32 with 7 rounds."""
    words = philox4x32((np.zeros(3), 0, 0, 0), 0)
    assert [[f"{int(w):08x}" for w in word] for word in words] == [
        [hexadecimal] * 3 for hexadecimal in ("5f6fb709", "0d893f64", "4f121f81", "4f730a48")
    ]
    ones = philox4x32((2**32 - 1,) * 4, 2**64 - 1)
    assert [f"{int(word):08x}" for word in ones] == ["5207ddc2", "45165e59", "4d8ee751", "8c52f662"]
