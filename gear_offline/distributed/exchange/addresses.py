"""Which IPv4 address of this node the other ranks can reach."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct

from gear_offline.errors import InputError

_SIOCGIFADDR = 0x8915


def address_of(interface: str | None) -> str:
    """Return the IPv4 address of a network interface.

    Parameters
    ----------
    interface
        Name such as ``"eth0"``; ``None`` takes the one that leads to ``MASTER_ADDR``, or the
        loopback where that is not set.

    Raises
    ------
    InputError
        ``EXCHANGE_INTERFACE``
    """
    if interface is None:
        return _towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    name = interface.encode()
    request = array.array("B", struct.pack("256s", name[:15]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request, True)
        except OSError as error:
            names = ", ".join(found for _, found in socket.if_nameindex())
            raise InputError(
                "EXCHANGE_INTERFACE",
                f"network interface {interface!r} is not there or has no IPv4 address",
                remedy=f"choose one of {names}",
            ) from error
    return socket.inet_ntoa(bytes(request[20:24]))


def _towards(host: str) -> str:
    """Return the local address of the route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise InputError(
                "EXCHANGE_INTERFACE",
                f"there is no route to MASTER_ADDR {host!r}: {error}",
                remedy="name the network interface that leads to the other nodes",
            ) from error
