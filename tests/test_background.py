"""Work beside the training is done in order, waited for, and its errors come back."""

from __future__ import annotations

import threading

import pytest

from gear_offline.training.background import Background


def test_work_is_done_in_order_and_waited_for() -> None:
    done: list[int] = []
    gate = threading.Event()
    background = Background(beside=True, name="test")

    def held() -> None:
        assert gate.wait(30)
        done.append(0)

    background.submit(held)
    for number in (1, 2, 3):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    gate.set()
    background.wait()
    assert done == [0, 1, 2, 3]
    background.close()
    background.submit(lambda: done.append(4))  # a closed one begins anew
    background.close()
    assert done[-1] == 4 and "test" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("beside", [True, False])
def test_the_first_error_ends_it_and_comes_back(beside: bool) -> None:
    done: list[int] = []
    background = Background(beside=beside, name="test")

    def fail() -> None:
        raise OSError("no")

    try:
        background.submit(fail)
        background.submit(lambda: done.append(1))
    except OSError:
        pass
    for call in (background.wait, background.check, lambda: background.submit(lambda: None)):
        with pytest.raises(OSError, match="no"):
            call()
    background.close()
    assert done == []


def test_without_a_thread_work_is_done_at_once() -> None:
    threads: list[threading.Thread] = []
    Background(beside=False, name="test").submit(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
