"""Sources and datasets of servers: a web server that fails in many ways, and fsspec's protocols."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import xxhash

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.batches.tables import disk
from gear_offline.cli.main import main
from gear_offline.core import remote
from gear_offline.core.workers import WorkerPool
from gear_offline.data.convert import shards
from gear_offline.data.dataset import fetch
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.runs.checks import check_data
from gear_offline.runs.data import prepare_dataset
from tests.support import (
    Captured,
    Patch,
    contents,
    hopper_columns,
    make_dataset,
    one_error,
    run_python,
    write_hdf5,
)
from tests.test_loader import same

LONG = bytes(range(256)) * (24 << 12)  # 24 MiB: more than the buffers of a connection


class Server(http.server.ThreadingHTTPServer):
    """Serves files in memory, by ranges, and fails as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.paths: list[str] = []  # of all requests
        self.ranges: list[str] = []  # of the requests for one
        self.most: int | None = None  # bytes after which each answer breaks off
        self.sent, self.drip = 0, 0.0  # seconds between two bytes
        self.status = 0  # of each answer
        self.login = ""  # that it asks for
        self.tag, self.has_ranges, self.has_size = "ETag", True, True
        self.elsewhere = ""  # where it sends who asks
        self.logins: list[str | None] = []  # that were given
        self.coding = ""  # of each content
        self.wait: Callable[[], object] = lambda: None  # called before each answer with a content

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client may close the connection early


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, span, path = self.server, self.headers["Range"], self.path.partition("?")[0]
        server.paths.append(path)
        server.logins.append(self.headers["Authorization"])
        if server.login and self.headers["Authorization"] != f"Basic {server.login}":
            return self.send_error(401)
        if server.elsewhere:
            self.send_response(302)
            self.send_header("Location", server.elsewhere + self.path)
            return self.end_headers()
        if server.status or path not in server.files:
            return self.send_error(server.status or 404)
        content, most, begin = server.files[path], server.most, 0
        size = end = len(content)
        server.wait()
        if span and server.has_ranges:
            server.ranges.append(span)
            begin, end = (int(text) for text in (*re.findall(r"\d+", span), end - 1)[:2])
            end += 1
            if begin >= size:
                return self.send_error(416)
        self.send_response(206 if span and server.has_ranges else 200)
        if span and server.has_ranges:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        if server.tag:
            self.send_header(server.tag, f'"{hash(content)}"')
        if server.coding:
            self.send_header("Content-Encoding", server.coding)
        if server.has_size:
            self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if server.drip:
            for at in range(begin, end):
                self.wfile.write(content[at : at + 1])
                time.sleep(server.drip)
        self.wfile.write(content[begin:end][:most])
        server.sent += end - begin


@pytest.fixture
def server(tmp_path: Path, monkeypatch: Patch) -> Iterator[Server]:
    """Serve ``data.hdf5``, which lies at ``tmp_path`` too, with an empty cache."""
    monkeypatch.setenv("GEAR_OFFLINE_CACHE", str(tmp_path / "cache"))
    with Server() as started:
        threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
        started.files["/data.hdf5"] = write_hdf5(tmp_path / "data.hdf5").read_bytes()
        yield started
        started.shutdown()


def whole_files(cache: Path) -> list[str]:
    """Return the names of files that look complete."""
    files = [path for path in cache.rglob("*") if path.is_file()]
    return [path.name for path in files if not path.name.startswith(".")]


def serve_folder(server: Server, folder: Path) -> str:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    server.files |= {f"/set/{name}": content for name, content in files.items()}
    return f"{server.url}/set"


def test_a_file_is_fetched_once_and_converted_as_a_local_one(
    server: Server, tmp_path: Path, capsys: Captured
) -> None:
    local = go.convert(tmp_path / "data.hdf5", tmp_path / "local", quiet=True)
    server.login = base64.b64encode(b"me:pass word").decode()
    secret = server.url.replace("//", "//me:pass%20word@") + "/data.hdf5?token=SECRET"
    assert main(["convert", secret, str(tmp_path / "out"), "-q"]) == 0
    (cached,) = (tmp_path / "cache").glob("*/data.hdf5")
    fetched = cached.stat()
    assert main(["convert", secret, str(tmp_path / "again"), "-q"]) == 0
    assert cached.stat() == fetched and len(whole_files(tmp_path / "cache")) == 1
    written = contents(tmp_path / "local")
    assert contents(tmp_path / "out").keys() == written.keys()
    for folder in ("out", "again"):
        manifest = go.open_dataset(tmp_path / folder).manifest
        assert manifest.source.uri == f"{server.url}/data.hdf5"
        assert manifest.source.files == local.source.files and manifest.shards == local.shards
        assert "SECRET" not in str(contents(tmp_path / folder)["manifest.json"])
    with one_error("SOURCE_READ", "refuses") as caught:
        go.open_source(secret.replace("pass", "WRONG"))
    assert "WRONG" not in str(caught.value) and "SECRET" not in str(caught.value)
    text = "".join(capsys.readouterr())
    assert "pass" not in text and "SECRET" not in text

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").touch()
    with one_error("OUTPUT_EXISTS"):  # before anything is fetched
        go.convert(f"{server.url}/none.hdf5", tmp_path / "taken")

    server.files["/data.hdf5"] = write_hdf5(tmp_path / "data.hdf5", seed=1).read_bytes()
    with go.open_source(secret) as source, go.open_source(tmp_path / "data.hdf5") as expected:
        steps = expected.spec.steps
        np.testing.assert_array_equal(
            source.read("rewards", 0, steps), expected.read("rewards", 0, steps)
        )


def test_addresses_are_written_in_many_ways(
    server: Server, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    data, content = make_dataset(tmp_path, [9, 30, 4]), server.files["/data.hdf5"]
    address = serve_folder(server, data.path)
    names = {"a b.hdf5": "a%20b", "a%20b.hdf5": "a%20b", "ü|.hdf5": "%C3%BC|", "a+b.HDF5": "a+b"}
    for number, (name, path) in enumerate(names.items()):
        server.files[f"/{path}{name[-5:]}"] = content
        query = "?u=http://a//b/../c&x=%2F&t=. " if number % 2 else ""
        go.convert(f"{server.url}/{name}{query}", tmp_path / str(number), quiet=True)
    server.login = base64.b64encode(b"me:pw").decode()
    secret = address.replace("http://", "HTTP://me:pw@")
    for text in (f"{secret}?sig=http://a//b/../c&t=.", f"{secret}/"):
        assert main(["inspect", text, "--json"]) == main(["audit", text, "--json"]) == 0
        assert main(["export", text, str(tmp_path / "x.hdf5"), "--overwrite", "-q"]) == 0
        told = "".join(capsys.readouterr())
        assert address in told and "me:pw" not in told and "sig=" not in told
    with Server() as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        other.files["/data.hdf5"] = content
        server.elsewhere, place = other.url.replace("127.0.0.1", "localhost"), f"{server.url}/data"
        go.convert(place.replace("//", "//me:pw@") + ".hdf5", tmp_path / "moved", quiet=True)
        assert {*other.logins} == {None}
        other.shutdown()
    with one_error("DATASET_NOT_FOUND", "give its path") as caught:
        go.inspect(f"file://{data.path}")
    assert caught.value.where == f"file://{data.path}"


def test_odd_names_are_read_or_refused(server: Server, tmp_path: Path) -> None:
    data, name = make_dataset(tmp_path, [9, 30, 4]), "ä b%20#c?d=e"
    memory, content = fsspec.filesystem("memory"), server.files["/data.hdf5"]
    memory.pipe(f"/bucket/{name}.hdf5", content)
    memory.put(str(data.path), f"/bucket/{name}", recursive=True)
    manifest = go.convert(f"memory://bucket/{name}.hdf5", tmp_path / "out", quiet=True)
    assert manifest.source.uri == f"memory://bucket/{name}.hdf5"
    for cache in (None, "1MB"):
        found = go.open_dataset(f"memory://bucket/{name}/", cache=cache)
        assert found.manifest.encode() == data.manifest.encode()
    for path in ("/a", "/a%20%23b%3Fc%25.hdf5"):
        server.files[path] = content
    with one_error("SOURCE_READ", "write %23 for # and %3F for \\?"):
        go.open_source(f"{server.url}/a #b?c%.hdf5")
    go.convert(f"{server.url}/a %23b%3Fc%25.hdf5", tmp_path / "odd", quiet=True)
    with one_error("SOURCE_READ", "without \\? and #"):
        go.open_source("webhdfs://127.0.0.1:9/a?b.hdf5")


SHOWING = {  # where an address of a file, A, may stand, and be shown
    "push A hub:me/box": 2,
    "push data.hdf5 A": 2,
    "inspect hub:A": 2,
    "convert A out --env A": 2,
    "convert A out --where A": 2,
    "convert A A": 2,
    "train A": 2,
    "train smoke data.path=A": 2,
    "train smoke --out=A": 2,
    "evaluate A": 2,
    "doctor A": 2,
    "A": 2,
    "convert A out": 0,
    "inspect out --json": 0,
}


def test_no_secret_of_an_address_is_shown_or_kept(
    server: Server, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    server.login = base64.b64encode(b"me:PASSWORD").decode()
    address = server.url.replace("//", "//me:PASSWORD@") + "/data.hdf5?sig=TOKEN"
    for line, status in SHOWING.items():
        assert (
            main([address if w == "A" else w.replace("A", address) for w in line.split()]) == status
        )
        told = "".join(capsys.readouterr())
        assert "PASSWORD" not in told and "TOKEN" not in told, line
    for path in tmp_path.rglob("*"):
        assert "TOKEN" not in str(path) and "PASSWORD" not in str(path)
        assert path.is_dir() or not re.search(b"TOKEN|PASSWORD", path.read_bytes()), path
    with one_error("OUTPUT_WRITE", "a local path"):
        go.convert("data.hdf5", "s3://bucket/out")


def test_workers_read_one_version(server: Server, tmp_path: Path) -> None:
    """A file that changes once it is fetched does not get into the shards of a worker."""
    options: dict[str, Any] = {"shard_bytes": 1 << 14, "quiet": True}
    local = go.convert(tmp_path / "data.hdf5", tmp_path / "local", **options)
    address, other = f"{server.url}/data.hdf5", write_hdf5(tmp_path / "other.hdf5", seed=1)
    remote.fetch_file(address, "SOURCE_READ")

    def change() -> None:
        server.files["/data.hdf5"] = other.read_bytes()

    server.wait = change
    manifest = go.convert(address, tmp_path / "out", workers=2, **options)
    assert len(local.shards) > 2 and manifest.shards == local.shards
    assert manifest.source.uri == address


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified"])
def test_a_break_is_gone_on_from(server: Server, tmp_path: Path, tag: str) -> None:
    size = len(server.files["/data.hdf5"])
    server.tag, server.most = tag, size // 3 + 1
    local = go.convert(tmp_path / "data.hdf5", tmp_path / "local", quiet=True)
    manifest = go.convert(f"{server.url}/data.hdf5", tmp_path / "out", quiet=True)
    assert manifest.shards == local.shards and manifest.source.files == local.source.files
    assert server.ranges == [f"bytes={size // 3 + 1}-", f"bytes={2 * (size // 3 + 1)}-"]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_later_process_goes_on(server: Server, tmp_path: Path, has_ranges: bool) -> None:
    address, size = f"{server.url}/data.hdf5", len(server.files["/data.hdf5"])
    server.has_ranges, server.most = False, 5000
    with one_error("SOURCE_READ", f"it sent 5000 of {size} bytes"):
        go.open_source(address)
    assert not whole_files(tmp_path / "cache")
    server.has_ranges, server.most = has_ranges, None
    manifest = go.convert(address, tmp_path / "out", quiet=True)
    assert server.ranges == ["bytes=5000-"] * has_ranges
    assert manifest.shards == go.convert(tmp_path / "data.hdf5", tmp_path / "l", quiet=True).shards
    assert sorted(p.name for p in (tmp_path / "cache").glob("*/*")) == ["data.hdf5"]


@pytest.mark.parametrize("most", [None, 5 << 20])
def test_a_file_that_changes_midway_is_refused(
    server: Server, tmp_path: Path, most: int | None
) -> None:
    server.files["/long.npz"], server.most = LONG, most
    answers = count()

    def change() -> None:
        if next(answers) == 1:  # the one before is a look, which reads nothing
            server.files["/long.npz"], server.most = LONG[::-1], None

    server.wait = change
    with one_error("SOURCE_CHANGED", "changed on the server"):
        go.open_source(f"{server.url}/long.npz")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    place = remote.fetch_file(f"{server.url}/long.npz", "SOURCE_READ")
    assert place.read_bytes() == LONG[::-1]


def test_a_server_without_versions_is_asked_anew(server: Server) -> None:
    server.tag = ""
    for content in (b"some", b"same", b"more bytes"):
        server.files["/x.npz"] = content
        place = remote.fetch_file(f"{server.url}/x.npz", "SOURCE_READ")
        assert place.read_bytes() == content


def test_a_file_that_is_sent_packed_is_named_so(server: Server, tmp_path: Path) -> None:
    address = serve_folder(server, make_dataset(tmp_path, [9, 30]).path)
    server.coding = "gzip"
    for call in (go.inspect, go.open_dataset, go.open_source):
        with one_error("SOURCE_READ", "sends it packed \\(gzip\\)"):
            call(address)
    with one_error("SOURCE_READ", "sends it packed"):
        go.open_source(f"{server.url}/data.hdf5")
    assert not whole_files(tmp_path / "cache")
    server.files["/log.gz"] = b"packed by its owner"
    place = remote.fetch_file(f"{server.url}/log.gz", "SOURCE_READ")
    assert place.read_bytes() == b"packed by its owner"
    server.coding = "identity"
    assert go.inspect(address)["episodes"] == 2


FAILURES = {404: "no such file", 410: "no such file", 403: "refuses: HTTP Error 403"}
FAILURES |= {500: "does not answer as it should: HTTP Error 500", 503: "HTTP Error 503"}


@pytest.mark.parametrize("status", FAILURES)
def test_a_refusal_is_one_error(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    for call, code in ((go.open_source, "SOURCE_READ"), (go.open_dataset, "DATASET_NOT_FOUND")):
        with one_error(code if status < 500 else "SOURCE_READ", FAILURES[status]) as caught:
            call(f"{server.url}/x.hdf5?token=SECRET")
        assert "SECRET" not in str(caught.value) and caught.value.remedy
        assert isinstance(caught.value, go.UnavailableError) == (status >= 500)
    assert main(["convert", f"{server.url}/x.hdf5", str(tmp_path / "out"), "-q"]) != 0
    assert not whole_files(tmp_path / "cache") and not (tmp_path / "out").exists()


def test_a_server_that_is_slow_or_gone_is_one_error(
    server: Server, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.1)
    released = threading.Event()
    server.wait = released.wait
    with one_error("SOURCE_READ", "timed out"):
        go.open_source(f"{server.url}/data.hdf5")
    released.set()
    with one_error("SOURCE_READ", "refused"):
        go.open_source("http://127.0.0.1:9/data.hdf5")
    assert not whole_files(tmp_path / "cache")


def test_a_dataset_is_opened_from_there(
    server: Server, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    data = make_dataset(tmp_path, [9, 30, 4], shard_bytes=1000)
    address = serve_folder(server, data.path)
    found = go.open_dataset(f"{address}/?token=SECRET")
    assert found.verified and found.manifest.encode() == data.manifest.encode()
    np.testing.assert_array_equal(found.column("observations"), data.column("observations"))
    assert main(["inspect", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 43
    assert main(["export", address, str(tmp_path / "flat.hdf5"), "-q"]) == 0
    assert main(["convert", address, str(tmp_path / "copy"), "-q"]) == 0
    copy = go.open_dataset(tmp_path / "copy")
    assert copy.manifest.source.uri == address
    np.testing.assert_array_equal(copy.column("rewards"), data.column("rewards"))

    monkeypatch.chdir(tmp_path)
    for options in ({"path": address}, {"path": "made", "source": address}):
        recipe = go.load_recipe("paper", {f"data.{key}": text for key, text in options.items()})
        check_data(recipe)
        for _ in range(2):  # it is made, and is there
            assert len(prepare_dataset(recipe, quiet=True).episodes.lengths) == 3
    other = go.load_recipe("paper", {"data.path": "made", "data.source": f"{address}/other"})
    with one_error("DATA_MISMATCH"):
        prepare_dataset(other, quiet=True)

    with one_error("RECIPE", "a path of this machine"):
        go.load_recipe("paper", {"data.path": address, "data.admit_every": 4})
    for option in ("path", "source"):
        with one_error("RECIPE", "holds no user or query") as caught:
            go.load_recipe("paper", {f"data.{option}": f"{address}?token=SECRET"})
        assert "SECRET" not in str(caught.value)

    # data that grow there, and another dataset in their place
    episode = hopper_columns(6)
    go.Appender(data.path).append([episode | {"terminated": True}])
    with GrowingDataset(go.open_dataset(data.path), admits=True, quiet=True) as growing:
        growing.admit(1)
    serve_folder(server, data.path)
    assert go.open_dataset(address).episodes.lengths.tolist() == [9, 30, 4, 6]
    serve_folder(server, tmp_path / "copy")
    del server.files["/set/admissions.jsonl"]
    assert go.open_dataset(address).manifest.encode() == copy.manifest.encode()
    np.testing.assert_array_equal(found.column("rewards"), data.column("rewards")[:43])


def test_a_damaged_shard_never_lies_in_the_cache(server: Server, tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [9, 30, 4], shard_bytes=1000)
    address, name = serve_folder(server, data.path), "/set/shard-00001.safetensors"
    whole = server.files[name]
    for damaged in (whole[:-1] + b"?", whole[:-1], whole + b"?", b"?" + whole[1:]):
        server.files[name] = damaged
        with one_error("DATASET_DAMAGED") as caught:
            go.open_dataset(address, verify=False)
        assert caught.value.where.startswith(f"{address}/shard-00001")
        assert "shard-00001.safetensors" not in whole_files(tmp_path / "cache")
    server.files[name], server.has_size = whole + b"?", False
    with one_error("DATASET_DAMAGED", "the manifest says"):
        go.open_dataset(address)
    server.files[name] = whole
    assert go.open_dataset(address).verified
    server.has_size = True
    server.files["/set/manifest.json"] = server.files["/set/manifest.json"][:-20]
    with one_error("DATASET_DAMAGED", re.escape(f"{address}/manifest.json")):
        go.open_dataset(address)


def test_protocols_of_fsspec_are_read(server: Server, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4097)
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/data.hdf5", server.files["/data.hdf5"])
    local = go.convert(tmp_path / "data.hdf5", tmp_path / "local", quiet=True)
    manifest = go.convert("memory://bucket/data.hdf5", tmp_path / "out", quiet=True)
    assert manifest.shards == local.shards and manifest.source.files == local.source.files
    assert manifest.source.uri == "memory://bucket/data.hdf5"
    memory.put(str(tmp_path / "local"), "/bucket/set", recursive=True)
    found = go.open_dataset("memory://bucket/set")
    assert found.verified and found.manifest.encode() == local.encode()
    with one_error("SOURCE_READ", "no such file"):
        go.open_source("memory://bucket/none.hdf5")
    with one_error("DATASET_NOT_FOUND", "no such file"):
        go.open_dataset("memory://bucket")

    def fail(*args: Any, **options: Any) -> bytes:
        raise RuntimeError("no bytes today")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    memory.pipe("/bucket/data.hdf5", b"other bytes")
    with one_error("SOURCE_READ", "no bytes today"):
        go.open_source("memory://bucket/data.hdf5")
    assert "data.hdf5" in whole_files(tmp_path / "cache")  # of before


MISTAKES = {
    "htps://host/x.hdf5": (2, "did you mean https:// or http://"),
    "nosuch://host/x.hdf5": (2, "did you mean"),
    "file:///data/x.hdf5": (2, "give its path"),
    "https://": (2, "names no server"),
    "http://[host/x.hdf5": (2, "no address"),
}


def test_mistakes_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    script = "import sys; from gear_offline.cli.main import main\n"
    for address in MISTAKES:
        script += f"print(main(['convert', {address!r}, 'out']), 'torch' in sys.modules)\n"
        script += f"print(main(['train', 'smoke', 'data.path=' + {address!r}, "
        script += "'data.source=null', 'data.collect=null']), 'torch' in sys.modules)\n"
    done = run_python("-c", script, check=True, cwd=tmp_path)
    expected = [f"{code} False" for code, _ in MISTAKES.values() for _ in range(2)]
    assert done.stdout.splitlines() == expected, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    for line, (_, words) in zip(lines[::2], MISTAKES.values(), strict=True):
        assert words in line
    assert len(lines) == len(expected) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["s3://bucket/x.hdf5", "abfs://box/x.hdf5"])
def test_a_missing_package_is_named(address: str, monkeypatch: Patch) -> None:
    def refuse(protocol: str) -> None:
        raise ImportError("Install adlfs to access it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", refuse)
    with one_error("PACKAGE_MISSING", "needs a package") as caught:
        go.open_source(address)
    extra = "pip install 'gear-offline[remote]'"
    assert caught.value.remedy == (extra if "s3" in address else "Install adlfs to access it")


# by ranges -----------------------------------------------------------------------------------

ROWS: dict[str, Any] = {"batch_size": 8, "context_length": 9, "device": "cpu", "gamma": 0.9}
ROWS |= {"placement": "disk", "host_budget": "1MiB"}
CACHE = 96 << 10  # a third of the blocks below


@pytest.fixture
def data(tmp_path: Path, monkeypatch: Patch) -> go.Dataset:
    """A dataset of blocks of a kibibyte, no column of which is kept in memory whole."""
    monkeypatch.setattr(disk, "RESIDENT_SHARE", 1 << 60)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    made = make_dataset(tmp_path, [30, 1, 7, 55, 20, 3] * 24)
    go.convert(made.path, tmp_path / "set", block_bytes=1 << 10, shard_bytes=80_000, quiet=True)
    return go.open_dataset(tmp_path / "set")


def blocks_in(cache: Path) -> dict[str, bytes]:
    """Return the blocks of a cache, whole all, within its size."""
    files = [path for path in cache.glob("*/*") if re.fullmatch("[0-9a-f]{32}", path.name)]
    blocks = {path.name: path.read_bytes() for path in files}
    assert {name: xxhash.xxh3_128_hexdigest(each) for name, each in blocks.items()} == {
        name: name for name in blocks
    }
    assert sum(-(-len(each) // 4096) * 4096 for each in blocks.values()) <= CACHE
    return blocks


@pytest.mark.parametrize("protocol", ["http", "memory"])
def test_batches_by_ranges_are_those_of_the_local_dataset(
    server: Server, data: go.Dataset, tmp_path: Path, protocol: str, capsys: Captured
) -> None:
    address = serve_folder(server, data.path)
    if protocol == "memory":
        address = "memory://bucket/ranges"
        fsspec.filesystem("memory").put(str(data.path), "/bucket/ranges", recursive=True)
    far = go.open_dataset(address, cache=CACHE)
    assert server.sent < data.manifest.total_bytes / 3
    observations, rewards = data.column("observations"), data.column("rewards")
    for one, other in ((data, far), (go.split(data, "30%")[0], go.split(far, "30%")[0])):
        with go.GearLoader(one, **ROWS) as local, go.GearLoader(other, **ROWS) as loader:
            for step in range(24):
                batch, draws = next(loader), loader.segments_at(step)
                assert same(batch, next(local))
                for row, number in enumerate(draws.episodes):
                    begin = int(one.file_steps[number] + draws.starts[row])
                    count = int(batch.attention_mask[row].sum())
                    rows = observations[begin : begin + count]
                    assert (batch.states[row, :count].numpy() == rows).all()
                if step % 8 == 0:
                    assert same(loader.batch_at(3), local.batch_at(3))
        assert blocks_in(tmp_path / "cache")
    assert "fetched whole: rewards;" in capsys.readouterr().err
    with go.GearLoader(far, **ROWS | {"placement": "host"}) as loader:  # and in memory
        assert same(next(loader), go.GearLoader(data, **ROWS | {"placement": "host"}).batch_at(0))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(far)).column("rewards"), rewards)
    assert not [name for name in whole_files(tmp_path / "cache") if name.startswith("shard")]
    assert blocks_in(tmp_path / "cache")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_commands_read_an_address_within_a_bounded_cache(
    server: Server, data: go.Dataset, tmp_path: Path, has_ranges: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fetch, "READ_CACHE", 1)  # as for data a thousand times as large
    address, total = serve_folder(server, data.path), data.manifest.total_bytes
    secret, server.has_ranges, sizes = f"{address}/?token=SECRET", has_ranges, [0]

    def watch() -> None:
        names = [path.name for path in (tmp_path / "cache").glob("*/*")]
        sizes.append(4096 * sum(len(name) == 32 for name in names))

    server.wait = watch
    near, far = go.inspect(data.path, verify=not has_ranges), go.inspect(secret)
    assert far == near | {"path": address}
    assert has_ranges == (server.sent < total / 3)
    assert main(["plan", "demo", f"data.path={address}", "--json"]) == 0
    found, expected = go.audit(secret, against=[secret]), go.audit(data.path, against=[data.path])
    assert str(found.to_json()) == str(expected.to_json()).replace(str(data.path), address)
    go.export_hdf5(secret, tmp_path / "far.hdf5", quiet=True)
    go.export_hdf5(data.path, tmp_path / "near.hdf5", quiet=True)
    with h5py.File(tmp_path / "far.hdf5") as one, h5py.File(tmp_path / "near.hdf5") as other:
        assert {*one} == {*other}
        assert all((one[name][()] == other[name][()]).all() for name in other)
    local = go.convert(data.path, tmp_path / "near", where="length > 5", quiet=True)
    for workers in (1, 2):
        options: dict[str, Any] = {"where": "length > 5", "workers": workers, "quiet": True}
        out = tmp_path / f"far-{workers}"
        manifest = go.convert(secret, out, **options)
        assert manifest.shards == local.shards and manifest.source.uri == address
        assert "SECRET" not in str(contents(out)["manifest.json"])
    fetched = [name for name in whole_files(tmp_path / "cache") if name.startswith("shard")]
    if not has_ranges:  # fetched whole, once
        assert len(fetched) == len(data.manifest.shards)
        return
    tensors = len(data.spec.columns) + 4
    assert not fetched and 0 < max(sizes) <= 2 * 4096 * tensors < total
    go.open_dataset(address)  # fetches all, where the commands then read
    server.sent = 0
    assert go.inspect(address)["verified"] and go.audit(address).steps == data.spec.steps
    assert server.sent < total / 3  # the manifest, to see whether it changed


READERS: dict[str, Callable[[str], object]] = {
    "inspect": go.inspect,
    "open": go.open_dataset,
    "open by ranges": lambda address: go.open_dataset(address, cache=CACHE),
    "audit": go.audit,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_manifest_is_fetched_once(server: Server, data: go.Dataset, reader: str) -> None:
    """And whether it changed is asked once before."""
    address = serve_folder(server, data.path)
    for requests in (2, 1):
        server.paths.clear()
        READERS[reader](address)
        assert server.paths.count("/set/manifest.json") == requests


def test_a_server_that_loses_its_ranges_is_read_once_it_was_opened_whole(
    server: Server, data: go.Dataset
) -> None:
    address = serve_folder(server, data.path)
    go.inspect(address)  # headers and episodes lie in the cache
    server.has_ranges = False
    with one_error("SOURCE_READ", "no ranges") as caught:
        go.audit(address)
    assert "go.open_dataset(ADDRESS)" in caught.value.remedy
    go.open_dataset(address)
    assert go.audit(address).steps == data.spec.steps


def test_a_manifest_that_changes_under_workers_is_refused(
    server: Server, data: go.Dataset, tmp_path: Path, monkeypatch: Patch
) -> None:
    other = make_dataset(tmp_path / "other", data.episodes.lengths.tolist(), seed=1)
    assert other.spec == data.spec
    address = serve_folder(server, data.path)

    def change(workers: int) -> WorkerPool:
        serve_folder(server, other.path)
        return WorkerPool(workers)

    monkeypatch.setattr(shards, "WorkerPool", change)
    with one_error("SOURCE_CHANGED", "changed while it was converted"):
        go.convert(address, tmp_path / "out", workers=2, shard_bytes=40_000, quiet=True)
    assert not (tmp_path / "out").exists()


def change(server: Server) -> None:
    for name in [name for name in server.files if "shard" in name]:
        server.files[name] = server.files[name][::-1]


FAULTS: dict[str, tuple[Callable[[Server], object], str, str]] = {
    "refuses": (lambda s: setattr(s, "status", 403), "SOURCE_READ", "server refuses"),
    "is gone": (lambda s: s.files.clear(), "SOURCE_READ", "no such file"),
    "fails": (lambda s: setattr(s, "status", 503), "SOURCE_READ", "503.*4 times"),
    "breaks off": (lambda s: setattr(s, "most", 99), "SOURCE_READ", "it sent 99 bytes"),
    "has no ranges": (lambda s: setattr(s, "has_ranges", False), "SOURCE_READ", "no ranges"),
    "changes": (change, "SOURCE_CHANGED", "digest"),
    "is cut": (lambda s: s.files.update(dict.fromkeys(s.files, b"")), "SOURCE_CHANGED", "shorter"),
    "hangs": (lambda s: setattr(s, "wait", lambda: time.sleep(0.3)), "SOURCE_READ", "timed out"),
    "is dead": (lambda s: s.server_close(), "SOURCE_READ", "refused.*4 times"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_midway_is_one_error(
    server: Server, data: go.Dataset, tmp_path: Path, fault: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.1)
    address = serve_folder(server, data.path)
    loader = go.GearLoader(go.open_dataset(address, cache=CACHE), **ROWS)
    loader.batch_at(0)
    before, (begin, code, words) = blocks_in(tmp_path / "cache"), FAULTS[fault]
    begin(server)
    with one_error(code, words) as caught:
        loader.dataset.column("observations")
    assert caught.value.where.startswith(f"{address}/shard-0") and caught.value.remedy
    with one_error(code, words):
        for _ in range(400):
            next(loader)
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gear-")]
    assert set(blocks_in(tmp_path / "cache")) <= set(before)


def test_a_server_that_fails_now_and_then_is_asked_again(
    server: Server, data: go.Dataset, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(remote, "_TRAFFIC", {})
    monkeypatch.setattr(remote, "TOLD_AFTER_SECONDS", 0.01)
    far, answers = go.open_dataset(serve_folder(server, data.path), cache=CACHE), count()

    def fail() -> None:
        server.most = 10 if next(answers) % 3 else None

    server.wait = fail
    np.testing.assert_array_equal(far.column("actions"), data.column("actions"))
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and 0 < told.count("KiB fetched in 0 seconds") < 15


def test_a_server_that_drips_is_an_error(
    server: Server, data: go.Dataset, monkeypatch: Patch
) -> None:
    far = go.open_dataset(serve_folder(server, data.path), cache=CACHE)
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.2)
    server.drip = 0.05
    with one_error("SOURCE_READ", r"it sent \d+ bytes for the 1024 .* in 0 seconds, 4 times"):
        far.column("observations")


ASKING = {  # requests before the silence, and what asks
    "looks at a file": (0, ["inspect"]),
    "opens": (5, ["inspect"]),
    "audits": (150, ["audit"]),
    "trains": (400, ["train", "smoke", "data.cache=100000", "train.steps=1e6"]),
}
TRAINING = ["evaluate.episodes=0", "loader.placement=disk", "loader.host_budget=4MiB"]


@pytest.mark.parametrize("asking", ASKING)
def test_ctrl_c_leaves_a_silent_server_at_once(
    server: Server, data: go.Dataset, tmp_path: Path, asking: str
) -> None:
    address, asked, (before, words) = serve_folder(server, data.path), count(), ASKING[asking]
    is_silent, released = threading.Event(), threading.Event()

    def wait() -> None:
        if next(asked) >= before:
            is_silent.set()
            released.wait()

    server.wait = wait
    words = [*words, *TRAINING, f"data.path={address}"] if "train" in words else [*words, address]
    command, pipe = [sys.executable, "-m", "gear_offline", *words], subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, text=True, cwd=tmp_path) as process:
        assert is_silent.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=remote.TIMEOUT_SECONDS)
    released.set()
    assert process.returncode == 130 and "Traceback" not in errors
    end = "^stopped by SIGINT after step.* is saved.*" if "train" in words else "^interrupted"
    assert re.search(f"{end}\n$", errors, re.MULTILINE)


READ = """
import sys, hashlib, gear_offline as go
for _ in range(4):
    data = go.open_dataset(sys.argv[1], cache=int(sys.argv[2]))
    print(hashlib.sha256(data.column("observations").tobytes()).hexdigest(), flush=True)
"""


def test_processes_share_a_cache_and_mend_it(
    server: Server, data: go.Dataset, tmp_path: Path
) -> None:
    address = serve_folder(server, data.path)
    command = [sys.executable, "-c", READ, address, str(CACHE)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert started[0].stdout and started[0].stdout.readline()
    started[0].kill()
    digest = hashlib.sha256(data.column("observations").tobytes()).hexdigest()
    assert [each.communicate()[0].split() for each in started[1:]] == [[digest] * 4] * 2
    started[0].communicate()
    name, *names = blocks_in(tmp_path / "cache")
    (block,) = (tmp_path / "cache").glob(f"*/{name}")
    for damaged in names[:3]:  # as after a power cut
        block.with_name(damaged).write_bytes(b"?" * 1024)
    block.with_name("used").write_bytes(b"")
    leftover = block.with_name(f".{name}.gear-part-0123456789ab")
    leftover.touch()
    far = go.open_dataset(address, cache=CACHE)
    np.testing.assert_array_equal(far.column("actions"), data.column("actions"))
    np.testing.assert_array_equal(far.column("rewards"), data.column("rewards"))
    blocks_in(tmp_path / "cache")
    assert not leftover.exists()
    go.open_dataset(address, cache=CACHE // 2)  # no larger than it is asked for
    assert 4096 * len(blocks_in(tmp_path / "cache")) <= CACHE // 2


def test_a_recipe_trains_and_reports_by_ranges(
    server: Server, data: go.Dataset, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = serve_folder(server, data.path)
    options = {
        "train.steps": 4,
        "evaluate.episodes": 0,
        "train.device": "cpu",
        "data.held_out": 0.3,
    }
    options |= {"loader.placement": "disk", "loader.host_budget": "4MiB"}
    far = go.train("smoke", options | {"data.path": address, "data.cache": "1MB"}, out="far")
    near = go.train("smoke", options | {"data.path": "set"}, out="near")
    logs = [read_records(run.path / "metrics.jsonl") for run in (far, near)]
    losses = [[row["loss"] for row in log if "loss" in row] for log in logs]
    assert losses[0] == losses[1] and len(losses[0])
    assert not [name for name in whole_files(tmp_path / "cache") if name.startswith("shard")]
    with one_error("RECIPE", "cache is for a path at an address"):
        go.load_recipe("smoke", {"data.path": "set", "data.cache": "1MB"})
    for path, cache, words in (
        ("set", "1MB", "at an address"),
        ("hub:a/b", "1MB", "hf://datasets/USER/NAME"),
        (address, 1000, "holds no block"),
        (address, "much", "no size"),
        (address, 0, "no size"),
        (address, True, "no size"),
    ):
        with one_error("USAGE", words):
            go.open_dataset(path, cache=cache)
