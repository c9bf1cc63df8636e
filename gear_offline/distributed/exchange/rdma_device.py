"""Which RDMA device, port and address belong to a network interface, as the kernel shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gear_offline.errors import UnavailableError

SYSFS = Path("/sys/class")
ROCE = "RoCE v2"
HOLES = 32  # unused entries of the address table in a row, after which it is taken to end
_IPV4 = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an RDMA device.

    Attributes
    ----------
    device, number
        E.g. ``"mlx5_0"`` and 1.
    interface
        The network interface it was asked for.
    gid_index, gid
        Its address: the one of the interface's IPv4 address if there is one.
    link_layer
        ``"Ethernet"`` or ``"InfiniBand"``.
    """

    device: str
    number: int
    interface: str
    gid_index: int
    gid: str
    link_layer: str

    def describe(self) -> str:
        return f"{self.device} port {self.number} on {self.interface}"


def find_port(interface: str, root: Path = SYSFS) -> Port:
    """Return the active port behind a network interface.

    Parameters
    ----------
    interface
        E.g. ``"eth2"`` or ``"ib0"``.
    root
        Of the kernel's description, for tests.

    Raises
    ------
    UnavailableError
        ``VERBS_DEVICE``
    """
    ports = sorted((root / "infiniband").glob("*/ports/*"))
    if not ports:
        raise _none("this machine has no RDMA device", "is its driver loaded? see `rdma link`")
    found = [*_roce_ports(ports, interface), *_infiniband_ports(ports, interface, root)]
    if not found:
        names = ", ".join(sorted({path.parent.parent.name for path in ports}))
        raise _none(
            f"no RDMA device belongs to network interface {interface!r}",
            f"devices are {names}; `rdma link` shows their interfaces",
        )
    active = [port for port, path in found if "ACTIVE" in _text(path / "state")]
    if not active:
        raise _none(f"{found[0][0].describe()} is not active", "bring the interface up")
    return active[0]


def _roce_ports(ports: list[Path], interface: str) -> list[tuple[Port, Path]]:
    """Return ports with a RoCE v2 address of the interface, IPv4 addresses first."""
    found = []
    for path in ports:
        unused = 0
        for index in range(len(os.listdir(path / "gid_attrs" / "ndevs"))):
            name = _text(path / "gid_attrs" / "ndevs" / str(index))
            unused = 0 if name else unused + 1
            if unused > HOLES:  # tables have hundreds of entries, the first few of them in use
                break
            if name != interface or _text(path / "gid_attrs/types" / str(index)) != ROCE:
                continue
            gid = _text(path / "gids" / str(index))
            port = _port(path, interface, index, gid)
            found.append((not gid.startswith(_IPV4), port.device, index, port, path))
    return [(port, path) for *_, port, path in sorted(found, key=lambda entry: entry[:3])]


def _infiniband_ports(ports: list[Path], interface: str, root: Path) -> list[tuple[Port, Path]]:
    """Return InfiniBand ports whose IP-over-InfiniBand interface it is."""
    base = root / "net" / interface
    devices = {path.name for path in (base / "device" / "infiniband").glob("*")}
    try:
        number = int(_text(base / "dev_port") or "0") + 1
    except ValueError:
        return []
    return [
        (_port(path, interface, 0, _text(path / "gids" / "0")), path)
        for path in ports
        if path.parent.parent.name in devices and path.name == str(number)
        if _text(path / "link_layer") == "InfiniBand"
    ]


def _port(path: Path, interface: str, gid_index: int, gid: str) -> Port:
    return Port(
        device=path.parent.parent.name,
        number=int(path.name),
        interface=interface,
        gid_index=gid_index,
        gid=gid,
        link_layer=_text(path / "link_layer"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # unused entries of the address table cannot be read
        return ""


def _none(what: str, remedy: str) -> UnavailableError:
    return UnavailableError("VERBS_DEVICE", what, remedy=f"{remedy}; or use mode='off'")
