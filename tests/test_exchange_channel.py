"""Connections between ranks: who does not know the secret learns nothing and changes nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.distributed.exchange.channel import Channel, Party, Refused, accept, connect
from gear_offline.distributed.exchange.mesh import THREAD_NAME, Mesh, check_secret
from gear_offline.distributed.exchange.rendezvous import FolderRendezvous
from gear_offline.errors import GearError
from tests.exchange_team import SECRET

OTHER = b"another secret of enough length"


def party(rank: int, *, secret: bytes = SECRET, job: str = "job", world: int = 3) -> Party:
    return Party(secret=secret, job=job, rank=rank, world=world, host=f"host{rank}")


def soon() -> float:
    return time.monotonic() + 2.0


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads; return what each gave or raised."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def handshake(caller: Party, listener: Party, rank: int = 0) -> list[Any]:
    """Return both ends, or what they raised; who refuses hangs up."""
    with sockets() as (one, two):

        def call() -> Channel:
            try:
                return connect(one, caller, rank, deadline=soon())
            except Refused:
                one.close()
                raise

        def answer() -> Channel:
            try:
                return accept(two, listener, deadline=soon())
            except Refused:
                two.close()
                raise

        return both(call, answer)


def test_both_sides_learn_who_the_other_is() -> None:
    caller, listener = handshake(party(1), party(0))
    assert (caller.rank, caller.host) == (0, "host0")
    assert (listener.rank, listener.host) == (1, "host1")


@pytest.mark.parametrize("wrong", ["caller", "listener"])
def test_another_secret_is_refused_by_both(wrong: str) -> None:
    caller = party(1, secret=OTHER if wrong == "caller" else SECRET)
    found = handshake(caller, party(0, secret=OTHER if wrong == "listener" else SECRET))
    assert [type(error) for error in found] == [Refused, Refused]
    assert "secret" in str(found[0]) and "secret" in str(found[1])


@pytest.mark.parametrize(
    "caller",
    [party(1, job="another"), party(1, world=4), party(0), party(7, world=3)],
    ids=["job", "world", "our own rank", "no such rank"],
)
def test_another_job_is_refused(caller: Party) -> None:
    assert isinstance(handshake(caller, party(0))[1], Refused)


def test_another_rank_than_the_one_called_is_refused() -> None:
    assert isinstance(handshake(party(2), party(1), rank=0)[0], Refused)


@given(st.binary(max_size=200))
def test_strangers_bytes_are_refused(data: bytes) -> None:
    with sockets() as (one, two):
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, OSError)):
            accept(two, party(0), deadline=soon())


def test_a_stranger_cannot_make_us_read_much() -> None:
    with sockets() as (one, two):
        one.sendall((1 << 30).to_bytes(4, "big"))
        with pytest.raises(Refused):
            accept(two, party(0), deadline=soon())


def test_an_answer_cannot_be_reflected() -> None:
    """A stranger plays our own proof back to us: as listener towards a caller that is us."""
    with sockets() as (one, two):

        def stranger() -> None:
            size = int.from_bytes(one.recv(4), "big")
            hello = json.loads(one.recv(size))
            hello["rank"] = 0
            data = json.dumps(hello).encode()
            one.sendall(len(data).to_bytes(4, "big") + data)
            one.sendall((32).to_bytes(4, "big") + bytes(32))

        found = both(stranger, lambda: connect(two, party(1), 0, deadline=soon()))
    assert isinstance(found[1], Refused)


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    with sockets() as (one, two):
        found = both(
            lambda: connect(one, party(1), 0, deadline=soon()),
            lambda: accept(two, party(0), deadline=soon()),
        )
        yield found[0], found[1]


def test_frames_arrive_whole_and_in_order() -> None:
    bodies = [b"", b"x", b"y" * 100_000, b"z" * 3]
    with channels() as (one, two):

        def send() -> None:
            for body in bodies:
                one.send(body, seconds=2)

        def receive() -> list[bytes]:
            found: list[bytes] = []
            while len(found) < len(bodies):
                two.socket.settimeout(2)
                two.socket.recv(1, socket.MSG_PEEK)
                found += two.receive()
            return found

        assert both(send, receive)[1] == bodies


@pytest.mark.parametrize("how", ["changed", "repeated", "reflected"])
def test_a_frame_that_is_not_authentic_is_refused(how: str) -> None:
    with channels() as (one, two):
        one.send(b"hello", seconds=2)
        frame = two.socket.recv(1000)
        if how == "changed":
            one.socket.sendall(frame[:-1] + bytes([frame[-1] ^ 1]))
            receiver = two
        elif how == "repeated":
            one.socket.sendall(frame + frame)
            receiver = two
        else:
            two.socket.sendall(frame)
            receiver = one
        with pytest.raises(Refused):
            receiver.receive()


@pytest.mark.parametrize("secret", [None, b"", b"short"])
def test_a_secret_must_be_long_enough(secret: bytes | None) -> None:
    with pytest.raises(GearError) as caught:
        check_secret(secret)
    assert caught.value.code == "EXCHANGE_SECRET"


def meshes(folder: Path, secrets: list[bytes], *, seconds: float = 5.0) -> list[Any]:
    world = len(secrets)

    def join(rank: int) -> Mesh:
        return Mesh(
            FolderRendezvous(folder, rank=rank, world=world),
            secret=secrets[rank],
            address="127.0.0.1",
            timeout=timedelta(seconds=seconds),
        )

    return both(*(lambda rank=rank: join(rank) for rank in range(world)))


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_a_mesh_gathers_and_ends_without_a_trace(tmp_path: Path) -> None:
    found = meshes(tmp_path, [SECRET] * 3)
    for turn in range(3):
        answers = both(*(lambda m=m: m.gather("turn", b"%d" % m.rank) for m in found))
        assert answers == [[b"0", b"1", b"2"]] * 3, turn
    assert len(ours()) == 3
    both(*(mesh.close for mesh in found))
    assert ours() == []


def test_ranks_with_another_secret_do_not_join(tmp_path: Path) -> None:
    found = meshes(tmp_path, [SECRET, OTHER, SECRET], seconds=2.0)
    assert [error.code for error in found[:2]] == ["EXCHANGE_SECRET"] * 2, found
    assert isinstance(found[2], GearError)
    assert ours() == []


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(GearError) as caught:
        Mesh(
            FolderRendezvous(tmp_path, rank=0, world=3),
            secret=SECRET,
            address="127.0.0.1",
            timeout=timedelta(seconds=0.2),
        )
    assert caught.value.code == "EXCHANGE_PEER" and "rank 1, 2" in str(caught.value)


def test_strangers_do_not_keep_a_job_from_starting(tmp_path: Path) -> None:
    def stranger() -> None:
        card = tmp_path / "0000-mesh.0"
        while not card.exists():
            time.sleep(0.002)
        host, port, _ = card.read_text().split(":")
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100)):
            try:
                with socket.create_connection((host, int(port)), timeout=1) as sock:
                    sock.sendall(data)
            except OSError:
                pass  # everyone has joined already

    thread = threading.Thread(target=stranger)
    thread.start()
    found = meshes(tmp_path, [SECRET] * 2)
    thread.join()
    assert all(isinstance(mesh, Mesh) for mesh in found), found
    both(*(mesh.close for mesh in found))


def test_a_reason_to_give_up_reaches_the_peers(tmp_path: Path) -> None:
    one, two = meshes(tmp_path, [SECRET] * 2)
    one.abort("the disk is full")
    deadline = soon()
    while two.failure() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    failure = two.failure()
    assert failure is not None and failure.code == "EXCHANGE_PEER"
    assert "rank 0" in str(failure) and "the disk is full" in str(failure)
    one.close()
    two.close()
