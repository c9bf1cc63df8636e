"""Which transport is taken, and what is said where RDMA is missing; devices as sysfs shows them."""

from __future__ import annotations

import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.distributed.exchange import Shelf, open_exchange
from gear_offline.distributed.exchange.addresses import address_of
from gear_offline.distributed.exchange.memory import RowMemory
from gear_offline.distributed.exchange.rdma_device import find_port
from gear_offline.distributed.exchange.verbs_library import load_verbs
from gear_offline.errors import GearError, InputError, UnavailableError
from tests.exchange_team import SECRET, Player, Team, World

ONE = World(lengths=(3,), row_bytes=(4,), holdings=(((0,),), ()))


@pytest.fixture(autouse=True)
def no_cache() -> None:
    load_verbs.cache_clear()


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)


@pytest.mark.usefixtures("no_pyverbs")
def test_a_missing_pyverbs_says_how_to_get_it() -> None:
    with pytest.raises(UnavailableError, match="apt install python3-pyverbs") as caught:
        load_verbs()
    assert caught.value.code == "VERBS_MISSING"


def modes(player: Player, world: World, given: tuple[str, ...]) -> tuple[str, str]:
    """Open in a mode of one's own; return transport, or the error's code, and what was said."""
    import io
    from contextlib import redirect_stderr

    sys.modules["pyverbs"] = None  # type: ignore[assignment]
    told = io.StringIO()
    with redirect_stderr(told):
        try:
            mode: Any = given[player.rank]
            with open_exchange(world.shelf(player.rank), mode=mode, secret=SECRET) as exchange:
                return exchange.name, told.getvalue()
        except GearError as error:
            return error.code, str(error)


def test_modes_without_pyverbs() -> None:
    with Team(2, "collective") as team:
        auto = team.run(modes, ONE, ("auto", "auto"))
        off = team.run(modes, ONE, ("off", "off"))
        on = team.run(modes, ONE, ("on", "on"))
        mixed = team.run(modes, ONE, ("on", "off"))
    assert [name for name, _ in auto] == ["collective"] * 2
    assert auto[0][1].startswith("exchange: collective (no RDMA at rank 0: pyverbs cannot be")
    assert auto[0][1].count("\n") == 1 and auto[1][1] == ""  # said once
    assert off == [("collective", "exchange: collective (mode='off')\n"), ("collective", "")]
    assert [code for code, _ in on] == ["VERBS_MISSING"] * 2
    assert [code for code, _ in mixed] == ["EXCHANGE_OPTION"] * 2


def reason(player: Player, world: World) -> str:
    """Return why `auto` finds no RDMA where pyverbs could be loaded."""
    import io
    from contextlib import redirect_stderr
    from importlib import import_module

    opening: Any = import_module("gear_offline.distributed.exchange.opening")
    library: Any = import_module("gear_offline.distributed.exchange.verbs_library")
    library.load_verbs = lambda: None
    told = io.StringIO()
    with redirect_stderr(told):
        opening.open_exchange(world.shelf(player.rank), secret=SECRET).close()
        os.environ["GEAR_OFFLINE_INTERFACE"] = "lo"
        opening.open_exchange(world.shelf(player.rank), secret=SECRET).close()
    return told.getvalue()


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there is an RDMA device here")
def test_the_interface_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEAR_OFFLINE_INTERFACE", raising=False)
    with Team(2, "collective") as team:
        said, _ = team.run(reason, ONE)
    first, second = said.splitlines()
    assert "RDMA needs the name" in first and "GEAR_OFFLINE_INTERFACE" in first
    assert "no RDMA device" in second


@pytest.mark.parametrize("options", [{"mode": "always"}, {"depth": 0}, {"window": 0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        open_exchange(Shelf(lengths=(1,), row_bytes=(4,)), **options)
    assert caught.value.code == "EXCHANGE_OPTION"


def test_without_a_process_group_there_is_no_collective() -> None:
    with pytest.raises(UnavailableError) as caught:
        open_exchange(Shelf(lengths=(1,), row_bytes=(4,)))
    assert caught.value.code == "EXCHANGE_TORCH"


@pytest.mark.parametrize("new", [False, True], ids=["44", "59"])
def test_constants_of_old_and_new_pyverbs(monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    """Both ways to name constants; and the root logger is left as it was."""
    import enum

    names = {"device": ["Context"], "pd": ["PD"], "mr": ["MR", "DmaBufMR"], "cq": ["CQ"],
             "qp": ["QP", "QPInitAttr", "QPCap", "QPAttr"], "wr": ["SGE", "SendWR"],
             "addr": ["AHAttr", "GlobalRoute", "GID"],
             "pyverbs_error": ["PyverbsError", "PyverbsRDMAError"]}  # fmt: skip
    package: Any = types.ModuleType("pyverbs")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    for module, classes in names.items():
        made = types.ModuleType(f"pyverbs.{module}")
        for name in classes:
            setattr(made, name, type(name, (), {}))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    constants: Any = types.ModuleType("pyverbs.libibverbs_enums" if new else "pyverbs.enums")
    if new:
        made_enum: Any = enum.IntEnum
        constants.ibv_qp_type = made_enum("ibv_qp_type", {"IBV_QPT_RC": 2})
    else:
        constants.IBV_QPT_RC = 2
        monkeypatch.setitem(sys.modules, "pyverbs.libibverbs_enums", None)
    monkeypatch.setitem(sys.modules, constants.__name__, constants)
    handlers = list(logging.getLogger().handlers)
    assert load_verbs().IBV_QPT_RC == 2
    assert logging.getLogger().handlers == handlers


def device(root: Path, name: str, *, state: str = "4: ACTIVE", layer: str = "Ethernet") -> Path:
    port = root / "infiniband" / name / "ports" / "1"
    for folder in ("gid_attrs/ndevs", "gid_attrs/types", "gids"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    return port


def gid(port: Path, index: int, interface: str, kind: str, address: str) -> None:
    (port / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")
    (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
    (port / "gids" / str(index)).write_text(address + "\n")


IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
IPV6 = "fe80:0000:0000:0000:a8bb:ccff:fedd:eeff"


def test_the_port_of_an_interface(tmp_path: Path) -> None:
    gid(device(tmp_path, "mlx5_0"), 0, "eth0", "RoCE v2", IPV4)
    port = device(tmp_path, "mlx5_1")
    gid(port, 0, "eth1", "IB/RoCE v1", IPV6)
    gid(port, 1, "eth1", "RoCE v2", IPV6)
    (port / "gid_attrs/ndevs/2").write_text("")
    gid(port, 3, "eth1", "RoCE v2", IPV4)
    found = find_port("eth1", tmp_path)
    assert (found.device, found.number, found.gid_index, found.gid) == ("mlx5_1", 1, 3, IPV4)


def test_the_port_of_an_infiniband_interface(tmp_path: Path) -> None:
    port = device(tmp_path, "mlx5_0", layer="InfiniBand")
    (port / "gids/0").write_text(IPV6)
    (tmp_path / "net/ib0/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "net/ib0/dev_port").write_text("0\n")
    found = find_port("ib0", tmp_path)
    assert (found.device, found.gid_index, found.link_layer) == ("mlx5_0", 0, "InfiniBand")


@pytest.mark.parametrize(
    ("make", "says"),
    [(False, "no RDMA device"), (True, "belongs to network interface")],
)
def test_no_port(tmp_path: Path, make: bool, says: str) -> None:
    if make:
        gid(device(tmp_path, "mlx5_0"), 0, "eth0", "RoCE v2", IPV4)
    with pytest.raises(UnavailableError, match=says) as caught:
        find_port("eth1", tmp_path)
    assert caught.value.code == "VERBS_DEVICE"


def test_a_port_that_is_down(tmp_path: Path) -> None:
    gid(device(tmp_path, "mlx5_0", state="1: DOWN"), 0, "eth0", "RoCE v2", IPV4)
    with pytest.raises(UnavailableError, match="not active"):
        find_port("eth0", tmp_path)


def test_addresses_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert address_of("lo") == address_of(None) == "127.0.0.1"
    with pytest.raises(InputError, match="choose one of") as caught:
        address_of("nothing0")
    assert caught.value.code == "EXCHANGE_INTERFACE"


def test_rows_of_arrays_and_tensors_are_the_same_bytes() -> None:
    import torch

    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    memory = RowMemory(tensor, row_bytes=8)
    assert (memory.count, memory.address, memory.on_gpu) == (3, tensor.data_ptr(), False)
    assert memory.bytes.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    array = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    assert RowMemory(array, row_bytes=16).bytes.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("rows", "row_bytes"),
    [(np.zeros((4, 4))[:, :2], 16), (np.zeros((4, 2)), 8), ([1, 2], 8), (np.zeros(()), 8)],
    ids=["strided", "wrong width", "a list", "no rows"],
)
def test_other_memory_is_refused(rows: Any, row_bytes: int) -> None:
    with pytest.raises(InputError) as caught:
        RowMemory(rows, row_bytes=row_bytes)
    assert caught.value.code == "EXCHANGE_BUFFER"


def test_a_read_only_destination_is_refused() -> None:
    rows = np.zeros((2, 4), np.uint8)
    rows.flags.writeable = False
    RowMemory(rows, row_bytes=4)
    with pytest.raises(InputError, match="read-only"):
        RowMemory(rows, row_bytes=4, writable=True)
