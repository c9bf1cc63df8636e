"""Who is still there: every rank answers on a port of its own, and asks when it misses somebody.

Errors of torch's collectives name an address at best, and none where a link is cut: nothing comes,
until time is up.  A thread answers, so that a rank that is busy answers too.

Shape legend: W ranks.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence

ASK_SECONDS = 2.0  # for all ranks together to answer
TOKEN_BYTES = 16
_UNDER_WAY = (0, errno.EINPROGRESS)
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
_REFUSED = "is gone"
_SILENT = "does not answer: stopped, or the link to it is cut"


class RollCall:
    """Answers that this rank is there, and asks the others.

    Parameters
    ----------
    address
        IPv4 address that the other ranks reach.
    ranks
        W.

    Attributes
    ----------
    card
        What the others need to ask this rank: address, port and the answer they must get.
    """

    def __init__(self, address: str, *, ranks: int) -> None:
        self._listener = socket.create_server((address, 0), backlog=max(16, ranks))
        self._token = os.urandom(TOKEN_BYTES)
        self.card = f"{address}:{self._listener.getsockname()[1]}:{self._token.hex()}"
        self._closed = False
        self._thread = threading.Thread(target=self._answer, name="gear-roll-call", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                if self._closed:
                    return
                connection.setblocking(False)
                try:
                    connection.send(self._token)  # a few bytes always fit
                except OSError:
                    continue

    def close(self) -> None:
        """Stop answering.  May be called again."""
        if self._closed:
            return
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join()


def missing_ranks(cards: Sequence[str], *, but: int, seconds: float = ASK_SECONDS) -> list[str]:
    """Ask all ranks at once; return a clause for each that does not answer, in their order.

    Parameters
    ----------
    cards
        (W,) of all ranks, from `RollCall.card`.
    but
        This rank, which is not asked.
    seconds
        For all answers together; waits that long only for who is silent.
    """
    found: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for rank, card in enumerate(cards):
                if rank != but:
                    address, port, token = card.split(":")
                    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                    sock.setblocking(False)
                    data = (rank, bytes.fromhex(token))
                    selector.register(sock, selectors.EVENT_READ, data)
                    found[rank] = _SILENT
                    if sock.connect_ex((address, int(port))) not in _UNDER_WAY:
                        selector.unregister(sock)
                        sock.close()
            deadline = time.monotonic() + seconds
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank, token_bytes = key.data
                    found[rank] = _heard(key.fileobj, token_bytes)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    names = {rank: f"rank {rank} ({card.split(':')[0]})" for rank, card in enumerate(cards)}
    return [f"{names[rank]} {what}" for rank, what in sorted(found.items()) if what]


def _heard(sock: object, token: bytes) -> str:
    """Return what stands against a rank whose connection has news; nothing if it answered."""
    assert isinstance(sock, socket.socket), "only sockets are registered"
    try:
        return "" if sock.recv(TOKEN_BYTES) == token else _REFUSED
    except OSError as error:
        return _SILENT if error.errno in _NO_WAY else _REFUSED
