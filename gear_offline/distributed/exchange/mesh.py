"""Connections between all ranks of an exchange, for keys, roll calls and bad news.

No rows travel here.  One thread a process listens, so that a rank that is busy still answers, and
one that is gone is noticed at once.

Frame bodies: ``P`` ping, ``Q`` answer with the last posted step, ``D`` data of a gather,
``A`` a reason why the sender gave up, ``B`` good-bye.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from gear_offline.distributed.exchange.channel import Channel, Party, Refused, accept, connect
from gear_offline.distributed.exchange.rendezvous import Rendezvous
from gear_offline.errors import GearError, InputError

HANDSHAKE_SECONDS = 5.0  # for who connects to us
ANSWER_SECONDS = 2.0  # for a ping, at most
THREAD_NAME = "gear-exchange"


class Mesh:
    """Authenticated connections to every peer.

    Parameters
    ----------
    rendezvous
        Where addresses are told.
    secret
        Of the job; `gear_offline.distributed.exchange.channel.SECRET_BYTES` or longer.
    address
        IPv4 address to listen on.
    timeout
        For every wait.

    Attributes
    ----------
    job
        Name that this mesh alone has, the same on every rank.
    position
        Last step that this rank posted, told to peers that ask.

    Raises
    ------
    GearError
        ``EXCHANGE_PEER`` if a rank does not come, ``EXCHANGE_SECRET`` if it has another secret.
    """

    def __init__(
        self, rendezvous: Rendezvous, *, secret: bytes, address: str, timeout: timedelta
    ) -> None:
        self.rank, self.world, self.timeout = rendezvous.rank, rendezvous.world, timeout
        self.address, self.job, self.position = address, "", -1
        self._peers: dict[int, Channel] = {}
        self._lost: dict[int, str] = {}
        self._gone: set[int] = set()  # said good-bye
        self._aborts: dict[int, str] = {}
        self._inbox: dict[tuple[int, str], bytes] = {}
        self._answers: dict[int, int] = {}
        self._news = threading.Condition()
        self._turns = 0
        self._closed = False
        self._join(rendezvous, secret, address)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        for channel in self._peers.values():
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        self._thread = threading.Thread(target=self._listen, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # -- joining

    def _join(self, rendezvous: Rendezvous, secret: bytes, address: str) -> None:
        """Call the lower ranks, then answer the higher ones."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        with socket.create_server((address, 0), backlog=max(self.world, 16)) as listener:
            card = f"{address}:{listener.getsockname()[1]}:{os.urandom(16).hex()}".encode()
            cards = rendezvous.gather("mesh", card, timeout=self.timeout)
            self.job = hashlib.sha256(b"\n".join(cards)).hexdigest()
            party = Party(
                secret=secret,
                job=self.job,
                rank=self.rank,
                world=self.world,
                host=socket.gethostname(),
            )
            try:
                for rank in range(self.rank):
                    self._peers[rank] = self._call(cards[rank], party, rank, deadline)
                self._answer(listener, party, deadline)
            except BaseException:
                for channel in self._peers.values():
                    channel.close()
                raise

    def _call(self, card: bytes, party: Party, rank: int, deadline: float) -> Channel:
        host, port, _ = card.decode().split(":")
        try:
            seconds = max(deadline - time.monotonic(), 0.001)
            sock = socket.create_connection((host, int(port)), timeout=seconds)
        except OSError as error:
            raise _unreachable(rank, f"{host}:{port}", error) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connect(sock, party, rank, deadline=deadline)
        except Refused as error:
            sock.close()
            raise _other_secret(str(error), f"{host}:{port}") from error
        except OSError as error:
            sock.close()
            raise _unreachable(rank, f"{host}:{port}", error) from error

    def _answer(self, listener: socket.socket, party: Party, deadline: float) -> None:
        """Let the higher ranks in; whoever cannot prove that it is one is sent away."""
        refusals: list[str] = []
        while missing := sorted(set(range(self.rank + 1, self.world)) - set(self._peers)):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                names = ", ".join(map(str, missing))
                if refusals:
                    what = f"rank {names} did not join; {'; '.join(dict.fromkeys(refusals))}"
                    raise _other_secret(what, "")
                raise GearError(
                    "EXCHANGE_PEER",
                    f"rank {names} did not connect within {self.timeout.total_seconds():g} s",
                    remedy="look at the messages of that rank, and at the network to its node",
                )
            listener.settimeout(seconds)
            try:
                sock, origin = listener.accept()
            except TimeoutError:
                continue
            limit = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = accept(sock, party, deadline=limit)
                if channel.rank not in missing:
                    raise Refused(f"rank {channel.rank} is not expected")
            except (Refused, OSError) as error:
                sock.close()
                refusals.append(f"{origin[0]} was refused: {error}")
            else:
                self._peers[channel.rank] = channel

    # -- listening

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                channel: Channel = key.data
                try:
                    for body in channel.receive():
                        self._take(channel, body)
                except BlockingIOError:
                    continue
                except (OSError, Refused) as error:
                    self._selector.unregister(channel.socket)
                    with self._news:
                        self._lost.setdefault(channel.rank, str(error))
                        self._news.notify_all()

    def _take(self, channel: Channel, body: bytes) -> None:
        kind, rest = body[:1], body[1:]
        if kind == b"P":
            channel.send(b"Q%d" % self.position, seconds=ANSWER_SECONDS)
            return
        with self._news:
            if kind == b"Q":
                self._answers[channel.rank] = int(rest)
            elif kind == b"D":
                name, _, payload = rest.partition(b"\0")
                self._inbox[channel.rank, name.decode()] = payload
            elif kind == b"A":
                self._aborts.setdefault(channel.rank, rest.decode(errors="replace"))
            elif kind == b"B":
                self._gone.add(channel.rank)
            self._news.notify_all()

    # -- what the transports use

    def name_of(self, rank: int) -> str:
        """Return a rank with its host, for messages."""
        channel = self._peers.get(rank)
        return f"rank {rank} on {channel.host}" if channel else f"rank {rank}"

    def failure(self) -> GearError | None:
        """Return the error if a peer is lost or gave up; costs next to nothing."""
        if not self._lost and not self._aborts:
            return None
        with self._news:
            for rank, why in self._aborts.items():
                return _gave_up(self.name_of(rank), why)
            for rank, why in self._lost.items():
                if rank not in self._gone:
                    return _lost(self.name_of(rank), why)
        return None

    def gather(self, name: str, payload: bytes = b"") -> list[bytes]:
        """Return what every rank gave, by rank; all call it in the same order.

        Raises
        ------
        GearError
            ``EXCHANGE_PEER``, ``EXCHANGE_TIMEOUT``
        """
        self._turns += 1
        title = f"{self._turns}-{name}"
        seconds = self.timeout.total_seconds()
        deadline = time.monotonic() + seconds
        self._send_all(b"D" + title.encode() + b"\0" + payload, seconds=seconds)
        with self._news:
            while missing := [r for r in self._peers if (r, title) not in self._inbox]:
                left = deadline - time.monotonic()
                dead = [r for r in missing if r in self._lost or r in self._aborts]
                if dead or left <= 0:
                    break
                self._news.wait(left)
            if not missing:
                others = {r: self._inbox.pop((r, title)) for r in self._peers}
                return [payload if r == self.rank else others[r] for r in range(self.world)]
        raise self.failure() or _late(
            ", ".join(map(self.name_of, missing)), f"did not answer ({name})", self.timeout
        )

    def blame(self, step: int, timeout: timedelta, suspects: Iterable[int] = ()) -> GearError:
        """Ask all peers where they are, and return an error that names who keeps us waiting.

        Parameters
        ----------
        step
            That did not complete.
        timeout
            For the message: how long was waited.
        suspects
            Ranks to name if all answer and none is behind.
        """
        with self._news:
            self._answers.clear()
        self._send_all(b"P", seconds=ANSWER_SECONDS / 2)
        deadline = time.monotonic() + min(ANSWER_SECONDS, timeout.total_seconds() / 4)
        with self._news:
            while silent := [
                r for r in self._peers if r not in self._answers and r not in self._gone
            ]:
                left = deadline - time.monotonic()
                if left <= 0 or any(r in self._lost for r in silent):
                    break
                self._news.wait(left)
            behind = [r for r, at in self._answers.items() if at < step]
        if found := self.failure():
            return found
        if silent:
            names = ", ".join(map(self.name_of, silent))
            return _late(names, "does not answer: stopped, or the link is cut", timeout, step)
        if behind:
            names = ", ".join(
                f"{self.name_of(r)} (at step {self._answers[r]})" for r in sorted(behind)
            )
            return _late(names, "has not posted it", timeout, step)
        suspects = list(suspects) or list(self._peers)
        if closed := [rank for rank in suspects if rank in self._gone]:
            return _lost(", ".join(map(self.name_of, closed)), "it has closed its exchange")
        names = ", ".join(map(self.name_of, suspects))
        return _late(names, "answers, but its rows do not come", timeout, step)

    def abort(self, why: str) -> None:
        """Tell all peers why this rank gives up."""
        self._send_all(b"A" + why.encode()[:1000], seconds=ANSWER_SECONDS / 2)

    def _send_all(self, body: bytes, *, seconds: float) -> None:
        for rank, channel in self._peers.items():
            if rank in self._lost:
                continue
            try:
                channel.send(body, seconds=seconds)
            except OSError as error:
                with self._news:
                    self._lost.setdefault(rank, str(error))
                    self._news.notify_all()

    def close(self) -> None:
        """Say good-bye, end the thread and close the connections.  May be called again."""
        if self._closed:
            return
        self._closed = True
        self._send_all(b"B", seconds=ANSWER_SECONDS / 2)
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for channel in self._peers.values():
            channel.close()


def check_secret(secret: bytes | None) -> bytes:
    """Return a usable secret; ``EXCHANGE_SECRET`` if it is missing or too short."""
    from gear_offline.distributed.exchange.channel import SECRET_BYTES

    if secret is None or len(secret) < SECRET_BYTES:
        raise InputError(
            "EXCHANGE_SECRET",
            "the job has no secret" if secret is None else "the job's secret is too short",
            remedy=f"give all ranks the same {SECRET_BYTES} or more random bytes, e.g. "
            "GEAR_OFFLINE_SECRET=$(openssl rand -hex 32)",
        )
    return secret


def _lost(name: str, why: str) -> GearError:
    return GearError(
        "EXCHANGE_PEER",
        f"{name} is gone: {why}",
        remedy="look at the messages of that rank; start the job again from its last checkpoint",
    )


def _gave_up(name: str, why: str) -> GearError:
    return GearError(
        "EXCHANGE_PEER", f"{name} gave up: {why}", remedy="look at the messages of that rank"
    )


def _late(names: str, what: str, timeout: timedelta, step: int | None = None) -> GearError:
    during = "" if step is None else f" of step {step}"
    return GearError(
        "EXCHANGE_TIMEOUT",
        f"waited {timeout.total_seconds():g} s{during} for {names}, which {what}",
        remedy="look at that rank and at the network to its node, or raise the timeout",
    )


def _unreachable(rank: int, address: str, error: OSError) -> GearError:
    return GearError(
        "EXCHANGE_PEER",
        f"rank {rank} cannot be reached at {address}: {error}",
        remedy="look at the network, a firewall, and the messages of that rank",
    )


def _other_secret(what: str, address: str) -> GearError:
    return GearError(
        "EXCHANGE_SECRET",
        what,
        where=address,
        remedy="give all ranks of the job the same secret",
    )
