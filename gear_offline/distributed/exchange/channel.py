"""A TCP connection between two ranks that both know the job's secret.

Both sides prove that they know it: each answers a random challenge with an HMAC over both
challenges, the job, the two ranks and its role, so that no answer can be played back or reflected.
From then on each frame carries an HMAC under a key of this connection and direction, with a
counter.  Nothing is encrypted.

Frame: body length (4 bytes, network order), HMAC-SHA256 (32 bytes), body.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass

MAGIC = "gear-offline exchange 1"
SECRET_BYTES = 16  # shortest secret that is accepted
CHALLENGE_BYTES = 32
MAC_BYTES = 32
HELLO_LIMIT = 4096  # bytes that a stranger may make us read
FRAME_LIMIT = 1 << 30
_LENGTH = struct.Struct("!I")


class Refused(Exception):
    """The other side did not prove that it belongs to the job."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """What both sides of a connection must agree on, and who this side is."""

    secret: bytes
    job: str
    rank: int
    world: int
    host: str


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA256 over parts whose lengths are part of what is signed."""
    signed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(key, signed, "sha256")


class Channel:
    """One authenticated connection; made by `connect` or `accept`.

    Attributes
    ----------
    rank, host
        Of the other side.
    """

    def __init__(self, sock: socket.socket, peer: dict[str, object], keys: tuple[bytes, bytes]):
        self.socket = sock
        self.rank, self.host = int(str(peer["rank"])), str(peer["host"])[:200]
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self._pending = bytearray()
        self._lock = threading.Lock()

    def send(self, body: bytes, *, seconds: float) -> None:
        """Send one frame; raises ``OSError`` if the peer does not take it in time."""
        with self._lock:
            tag = _mac(self._send_key, self._sent.to_bytes(8, "big"), body)
            self._sent += 1
            self.socket.settimeout(seconds)
            self.socket.sendall(_LENGTH.pack(len(body)) + tag + body)

    def receive(self) -> list[bytes]:
        """Return the frames that have come whole, after the socket became readable.

        Raises
        ------
        OSError
            If the connection has ended or failed.
        Refused
            If a frame is not authentic.
        """
        chunk = self.socket.recv(1 << 20, socket.MSG_DONTWAIT)
        if not chunk:
            raise ConnectionError("the connection has ended")
        self._pending += chunk
        frames = []
        while len(self._pending) >= _LENGTH.size + MAC_BYTES:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > FRAME_LIMIT:
                raise Refused("a frame is too large")
            begin, end = _LENGTH.size + MAC_BYTES, _LENGTH.size + MAC_BYTES + size
            if len(self._pending) < end:
                break
            tag, body = bytes(self._pending[_LENGTH.size : begin]), bytes(self._pending[begin:end])
            del self._pending[:end]
            wanted = _mac(self._receive_key, self._received.to_bytes(8, "big"), body)
            if not hmac.compare_digest(tag, wanted):
                raise Refused("a frame is not authentic")
            self._received += 1
            frames.append(body)
        return frames

    def close(self) -> None:
        self.socket.close()


def connect(sock: socket.socket, party: Party, rank: int, *, deadline: float) -> Channel:
    """Authenticate a connection that this side opened to `rank`.

    Raises
    ------
    Refused
        If the other side does not know the secret, or takes us for someone who does not.
    OSError
        If it hangs up or does not answer before `deadline` (`time.monotonic`).
    """
    mine = os.urandom(CHALLENGE_BYTES)
    hello = _hello(party, mine)
    _write(sock, hello, deadline)
    theirs = _read(sock, deadline)
    peer = _parse(theirs, party, rank)
    talk = (hello, theirs)
    proof = _read(sock, deadline)
    if not hmac.compare_digest(proof, _mac(party.secret, b"listener", *talk)):
        raise Refused(f"rank {rank} does not have this job's secret")
    _write(sock, _mac(party.secret, b"caller", *talk), deadline)
    keys = tuple(_mac(party.secret, side, *talk) for side in (b"from caller", b"from listener"))
    return Channel(sock, peer, (keys[0], keys[1]))


def accept(sock: socket.socket, party: Party, *, deadline: float) -> Channel:
    """Authenticate a connection that another rank opened; raises as `connect`."""
    theirs = _read(sock, deadline)
    peer = _parse(theirs, party, None)
    hello = _hello(party, os.urandom(CHALLENGE_BYTES))
    talk = (theirs, hello)
    _write(sock, hello, deadline)
    _write(sock, _mac(party.secret, b"listener", *talk), deadline)
    try:
        proof = _read(sock, deadline)
    except OSError as error:
        raise Refused(f"rank {peer['rank']} hung up at our proof: other secret?") from error
    if not hmac.compare_digest(proof, _mac(party.secret, b"caller", *talk)):
        raise Refused(f"rank {peer['rank']} does not have this job's secret")
    keys = tuple(_mac(party.secret, side, *talk) for side in (b"from listener", b"from caller"))
    return Channel(sock, peer, (keys[0], keys[1]))


def _hello(party: Party, challenge: bytes) -> bytes:
    return json.dumps(
        {
            "magic": MAGIC,
            "job": party.job,
            "rank": party.rank,
            "world": party.world,
            "host": party.host,
            "challenge": challenge.hex(),
        }
    ).encode()


def _parse(data: bytes, party: Party, rank: int | None) -> dict[str, object]:
    """Return what the other side says of itself; `Refused` if it cannot be one of us."""
    try:
        peer = json.loads(data)
        challenge = bytes.fromhex(peer["challenge"])
        number = peer["rank"]
        host = peer["host"]
        alike = (peer["magic"], peer["job"], peer["world"]) == (MAGIC, party.job, party.world)
    except (ValueError, KeyError, TypeError) as error:
        raise Refused("it does not speak this protocol") from error
    known = type(number) is int and 0 <= number < party.world and number != party.rank
    if not alike or not known or len(challenge) != CHALLENGE_BYTES or not isinstance(host, str):
        raise Refused("it belongs to another job or speaks another version")
    if rank is not None and number != rank:
        raise Refused(f"it says that it is rank {number}, not {rank}")
    return {"rank": number, "host": "".join(c for c in host if c.isprintable())}


def _write(sock: socket.socket, body: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _read(sock: socket.socket, deadline: float) -> bytes:
    (size,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size, deadline))
    if size > HELLO_LIMIT:
        raise Refused("it does not speak this protocol")
    return _read_exactly(sock, size, deadline)


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(size - len(found))
        if not part:
            raise ConnectionError("the connection has ended")
        found += part
    return found
