"""Which transport a job uses: decided by all ranks together, and said once with its reason."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any, Literal

from gear_offline.core.progress import say
from gear_offline.distributed.exchange.addresses import address_of
from gear_offline.distributed.exchange.contract import DEPTH, TIMEOUT, Exchange, Shelf
from gear_offline.distributed.exchange.endpoint import WINDOW
from gear_offline.distributed.exchange.mesh import Mesh, check_secret
from gear_offline.distributed.exchange.rdma_device import Port, find_port
from gear_offline.distributed.exchange.rendezvous import Rendezvous
from gear_offline.errors import GearError, InputError, UnavailableError

Mode = Literal["auto", "on", "off"]
SECRET_VARIABLE = "GEAR_OFFLINE_SECRET"
INTERFACE_VARIABLE = "GEAR_OFFLINE_INTERFACE"
# Without RDMA no key is given out, and torch.distributed itself asks nobody for a secret.
_NO_SECRET = b"gear-offline: torch.distributed has no secret either"


def open_exchange(
    shelf: Shelf,
    *,
    mode: Mode = "auto",
    group: Any = None,
    rendezvous: Rendezvous | None = None,
    secret: bytes | None = None,
    interface: str | None = None,
    depth: int = DEPTH,
    timeout: timedelta = TIMEOUT,
    window: int = WINDOW,
    quiet: bool = False,
) -> Exchange:
    """Open the exchange between the ranks; all call it with the same options.

    Parameters
    ----------
    shelf
        What this rank holds.
    mode
        RDMA between the nodes: ``"on"``, or an error that says what is missing and where;
        ``"off"``, torch.distributed; ``"auto"``, RDMA if every rank can, and a line on stderr says
        why not.
    group
        Torch process group whose ranks exchange rows (those that feed a model's input); the default
        group if there is one.
    rendezvous
        Instead of `group`, for jobs without torch.
    secret
        Of the job, 16 or more random bytes, the same on every rank; by default the environment
        variable ``GEAR_OFFLINE_SECRET``.  RDMA needs one.
    interface
        Network interface of this node to be bound to, e.g. ``"eth2"``; by default the environment
        variable ``GEAR_OFFLINE_INTERFACE``.  RDMA needs one; otherwise it is the one that leads to
        ``MASTER_ADDR``.
    depth
        Most steps that are posted and not yet waited for.
    timeout
        For every wait.
    window
        With RDMA, most reads in flight to one peer; the device may allow fewer.
    quiet
        Do not print what was chosen.

    Raises
    ------
    UnavailableError
        ``VERBS_MISSING``, ``VERBS_DEVICE``, ``EXCHANGE_TORCH``
    InputError
        ``EXCHANGE_OPTION``, ``EXCHANGE_SECRET``, ``EXCHANGE_INTERFACE``, ``EXCHANGE_SHELF``
    GearError
        ``EXCHANGE_PEER``, ``EXCHANGE_TIMEOUT``, ``EXCHANGE_SECRET``
    """
    if mode not in ("auto", "on", "off") or depth < 1 or window < 1 or timeout <= timedelta(0):
        raise InputError(
            "EXCHANGE_OPTION",
            f"mode {mode!r}, depth {depth}, window {window}, timeout {timeout} cannot be used",
            remedy="mode is auto, on or off; depth and window are 1 or more; timeout is positive",
        )
    if rendezvous is None:
        rendezvous = _group_rendezvous(group)
    if secret is None and SECRET_VARIABLE in os.environ:
        secret = os.environ[SECRET_VARIABLE].encode()
    interface = interface or os.environ.get(INTERFACE_VARIABLE) or None
    port, why = _agree(rendezvous, mode, secret, interface, timeout)
    if port is None:
        _group_rendezvous(group)  # refuses where torch.distributed cannot be used
    say(
        f"exchange: {'verbs' if port else 'collective'} ({why})",
        quiet=quiet or bool(rendezvous.rank),
    )
    mesh = Mesh(
        rendezvous,
        secret=check_secret(secret) if port or secret is not None else _NO_SECRET,
        address=address_of(interface),
        timeout=timeout,
    )
    try:
        if port is not None:
            from gear_offline.distributed.exchange.verbs import VerbsExchange

            return VerbsExchange(
                shelf, mesh=mesh, port=port, depth=depth, timeout=timeout, window=window
            )
        from gear_offline.distributed.exchange.collective import CollectiveExchange

        return CollectiveExchange(shelf, group=group, mesh=mesh, depth=depth, timeout=timeout)
    except BaseException as error:
        mesh.abort(f"{type(error).__name__}: {error}")
        mesh.close()
        raise


def _agree(
    rendezvous: Rendezvous,
    mode: Mode,
    secret: bytes | None,
    interface: str | None,
    timeout: timedelta,
) -> tuple[Port | None, str]:
    """Return this rank's port if all ranks can use RDMA, and why (not)."""
    problem: GearError | None = None
    port: Port | None = None
    try:
        if mode != "off":
            port = _usable_port(secret, interface)
    except GearError as error:
        problem = error
    code, what = (problem.code, str(problem)) if problem else ("", "")
    card = json.dumps([mode, code, what]).encode()
    answers = [json.loads(a) for a in rendezvous.gather("mode", card, timeout=timeout)]
    modes = sorted({answer[0] for answer in answers})
    if len(modes) > 1:
        raise InputError(
            "EXCHANGE_OPTION",
            f"the ranks differ in the mode of the exchange: {', '.join(modes)}",
            remedy="give every rank the same options",
        )
    for rank, (_, code, what) in enumerate(answers):
        if not code:
            continue
        if mode == "auto":
            return None, f"no RDMA at rank {rank}: {what}"
        if problem is not None:
            raise problem
        raise UnavailableError(
            "VERBS_DEVICE",
            f"rank {rank} cannot use RDMA: {code}: {what}",
            remedy="use mode='auto' or 'off', or mend that node",
        )
    if mode == "off":
        return None, "mode='off'"
    assert port is not None, "who has no port has a problem, and was dealt with"
    return port, f"RDMA on every rank; here {port.describe()}"


def _usable_port(secret: bytes | None, interface: str | None) -> Port:
    """Return the port that would be used; raises what stands against it."""
    from gear_offline.distributed.exchange.verbs_library import load_verbs

    load_verbs()
    if interface is None:
        raise InputError(
            "EXCHANGE_INTERFACE",
            "RDMA needs the name of the network interface to be bound to",
            remedy=f"set {INTERFACE_VARIABLE} (or interface=) to one of `ip link`",
        )
    port = find_port(interface)
    check_secret(secret)
    return port


def _group_rendezvous(group: Any) -> Rendezvous:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise UnavailableError(
            "EXCHANGE_TORCH",
            f"torch cannot be imported: {error}",
            remedy="give a rendezvous and mode='on', or install torch",
        ) from error
    if not dist.is_available() or not dist.is_initialized():
        raise UnavailableError(
            "EXCHANGE_TORCH",
            "there is no process group",
            remedy="launch with torchrun and call torch.distributed.init_process_group first",
        )
    from gear_offline.distributed.exchange.rendezvous import GroupRendezvous

    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return GroupRendezvous(group, device)
