"""Object stores and the Hub, by their own packages: servers of this machine, and one in between.

A `Middleman` stands before each server and fails as it is told.  Those of s3 and gs need
``pip install 'gear-offline[remote]' 'moto[s3,server]'``.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import http.server
import io
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import huggingface_hub
import numpy as np
import pytest

import gear_offline as go
from gear_offline.core import remote
from tests.support import Patch, contents, make_dataset, one_error, write_hdf5
from tests.test_hub import Repo, StandIn
from tests.test_remote import whole_files

pytestmark = pytest.mark.filterwarnings(  # of their packages, which leave sockets to be collected
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TOKEN = "hf_SECRETSECRET"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIASECRET", "AWS_SECRET_ACCESS_KEY": "SECRETSECRET"}


class Middleman(http.server.ThreadingHTTPServer):
    """Passes requests on to the server at `upstream`, and fails as it is told."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.url, self.upstream = f"http://127.0.0.1:{self.server_port}", upstream
        self.spans: list[str] = []  # of requests for ranges
        self.headers: list[str] = []  # of all requests, as text
        self.status = self.silence = 0
        self.most: int | None = None  # bytes after which an answer to a range breaks off
        self.elsewhere = ""  # where it sends who asks for a content
        self.answer: Callable[[str], object] = lambda path: None  # called before each

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client may close the connection early


class Passing(http.server.BaseHTTPRequestHandler):
    server: Middleman

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, span = self.server, self.headers["Range"]
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        server.headers.append(f"{self.path} {self.headers}")
        server.answer(self.path)
        time.sleep(server.silence)
        if server.status:
            return self.send_error(server.status)
        if span and server.elsewhere:
            self.send_response(302)
            self.send_header("Location", server.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        asked = http.client.HTTPConnection(urlsplit(server.upstream).netloc)
        asked.request(self.command, self.path, body, dict(self.headers))
        answer = asked.getresponse()
        content, most = answer.read(), None
        if span:
            server.spans.append(span)
            most = server.most
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        size = len(content) if self.command != "HEAD" else answer.headers["Content-Length"]
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(content[:most])

    do_HEAD = do_POST = do_PUT = do_GET


class Storage(http.server.ThreadingHTTPServer):
    """Google's storage: objects of a bucket, by its JSON API."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: dict[str, bytes] = {}


class Objects(http.server.BaseHTTPRequestHandler):
    server: Storage

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts, objects = urlsplit(self.path), self.server.objects
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        found = re.fullmatch(r"(/download)?/storage/v1/b/box/o(?:/(.+))?", parts.path)
        name = unquote((found and found[2]) or "")
        if found is None or (name and name not in objects):
            return self.reply(404, b'{"error": {"code": 404, "message": "Not Found"}}')
        if not name:
            prefix = query.get("prefix", "")
            items = [describe(key, objects[key]) for key in objects if key.startswith(prefix)]
            return self.reply(200, json.dumps({"items": items}).encode())
        if "alt" not in query:
            return self.reply(200, json.dumps(describe(name, objects[name])).encode())
        begin, end = map(int, re.findall(r"\d+", self.headers["Range"] or "0-999999999"))
        if begin >= len(objects[name]):
            return self.reply(416, b"")
        self.reply(206, objects[name][begin : end + 1])

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def describe(name: str, content: bytes) -> dict[str, str]:
    digest = hashlib.md5(content).digest()
    facts = {"kind": "storage#object", "name": name, "bucket": "box", "size": str(len(content))}
    facts |= {"md5Hash": base64.b64encode(digest).decode(), "etag": digest.hex()}
    facts["generation"] = str(int.from_bytes(digest[:6], "big"))
    return facts | {"updated": "2026-01-01T00:00:00Z"}


@dataclass
class Store:
    """A server of one protocol, with the middleman before it."""

    protocol: str
    address: str  # of a folder
    middle: Middleman
    put: Callable[[str, bytes], object]  # a file there
    redirects: bool = True  # followed by the protocol's package


def store_s3(stack: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="s3:// needs gear-offline[remote]")
    moto = pytest.importorskip("moto.server", reason="a server of s3:// needs moto[s3,server]")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    middle, url = Middleman(f"http://{host}:{port}"), f"http://{host}:{port}"
    settings = {**KEYS, "AWS_ENDPOINT_URL": middle.url, "AWS_MAX_ATTEMPTS": "1"}
    for name, value in settings.items():
        stack.setenv(name, value)
    box = fsspec.filesystem("s3", endpoint_url=url, skip_instance_cache=True)
    with suppress(FileExistsError):  # of a test before
        box.mkdir("box")
    yield Store("s3", "s3://box/in", middle, lambda name, b: box.pipe(f"box/in/{name}", b), False)
    server.stop()


def store_gs(stack: pytest.MonkeyPatch) -> Iterator[Store]:
    stack.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which asks Google's by gRPC
    gcsfs = pytest.importorskip("gcsfs", reason="gs:// needs gear-offline[remote]")
    with Storage() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        middle = Middleman(server.url)
        stack.setattr(gcsfs.GCSFileSystem, "_emulator_location", middle.url, raising=False)
        stack.setenv("STORAGE_EMULATOR_HOST", middle.url)
        stack.setattr(gcsfs.retry, "min", lambda *seconds: 0.01, raising=False)
        stack.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        objects = server.objects
        yield Store("gs", "gs://box/in", middle, lambda n, b: objects.update({f"in/{n}": b}))
        server.shutdown()


def store_hf(stack: pytest.MonkeyPatch) -> Iterator[Store]:
    with StandIn() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        middle, repo = Middleman(server.url), Repo(False)
        server.repos["datasets/me/box"] = repo
        repo.commit("main", {})
        form = middle.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": middle.url, "HUGGINGFACE_CO_URL_TEMPLATE": form}
        for name, value in settings.items():
            stack.setattr(huggingface_hub.constants, name, value)
        stack.setenv("HF_TOKEN", TOKEN)
        stack.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda s: None))

        def put(name: str, content: bytes) -> None:
            repo.commit("main", {**repo.commits[repo.branches["main"]], f"in/{name}": content})

        yield Store("hf", "hf://datasets/me/box/in", middle, put)
        server.shutdown()


@pytest.fixture(params=[store_s3, store_gs, store_hf], ids=["s3", "gs", "hf"])
def store(request: Any, tmp_path: Path, monkeypatch: Patch) -> Iterator[Store]:
    monkeypatch.setenv("GEAR_OFFLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    for store in request.param(monkeypatch):
        fsspec.get_filesystem_class(store.protocol).clear_instance_cache()
        threading.Thread(target=store.middle.serve_forever, args=(0.01,), daemon=True).start()
        yield store
        store.middle.shutdown()
        store.middle.server_close()
        fsspec.get_filesystem_class(store.protocol).clear_instance_cache()


@pytest.fixture
def data(tmp_path: Path, store: Store) -> go.Dataset:
    """A dataset of blocks of 4 KiB, which the store has too, as ``set``."""
    made = make_dataset(tmp_path, [30, 1, 7, 55, 20, 3] * 24)
    go.convert(made.path, tmp_path / "set", block_bytes=1 << 12, shard_bytes=80_000, quiet=True)
    for name, content in contents(tmp_path / "set").items():
        store.put(f"set/{name}", content)
    return go.open_dataset(tmp_path / "set")


def test_files_and_datasets_are_read(store: Store, data: go.Dataset, tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "data.hdf5")
    local = go.convert(file, tmp_path / "near", quiet=True)
    odd = f"{store.address}/ä b%20#c?d=e"
    for name, content in {"a.npz": b"another", "a": b"another"}.items():
        store.put(name, content)
    store.put("ä b%20#c?d=e.hdf5", file.read_bytes())
    far = go.convert(f"{odd}.hdf5", tmp_path / "far", quiet=True)
    assert far.shards == local.shards and far.source.uri == f"{odd}.hdf5"
    for name, content in contents(data.path).items():
        store.put(f"ä b%20#c?d=e/{name}", content)
    whole, ranged = go.open_dataset(f"{odd}/"), go.open_dataset(odd, cache="1MB")
    assert whole.name == ranged.name == odd and whole.manifest.encode() == data.manifest.encode()
    np.testing.assert_array_equal(ranged.column("actions"), data.column("actions"))

    address, middle = f"{store.address}/set", store.middle
    middle.spans.clear()
    assert go.inspect(address) == go.inspect(data.path, verify=False) | {"path": address}
    sizes = [int(end) - int(begin) + 1 for begin, end in (s[6:].split("-") for s in middle.spans)]
    assert max(sizes) < 1 << 13 and sum(sizes) < data.manifest.total_bytes / 3  # no read-ahead
    ranged = go.open_dataset(address, cache="1MB")
    assert go.audit(address).findings == go.audit(data.path).findings
    whole = go.open_dataset(address)
    for each in (ranged, whole):
        for column in data.spec:
            np.testing.assert_array_equal(each.column(column.name), data.column(column.name))
    with one_error("DATASET_NOT_FOUND", "no such file"):
        go.open_dataset(f"{store.address}/none")
    with one_error("SOURCE_READ", "no such file") as caught:
        go.open_source(f"{store.address}/none.hdf5")
    assert ("log in" in str(caught.value)) == (store.protocol == "hf")  # it may be private


def break_off(store: Store) -> None:
    store.middle.most = 99


def change(store: Store) -> None:
    """Put another content there, time and again, once a first range was asked for."""
    numbers = count()

    def put(path: str) -> None:
        if store.middle.spans:
            for name in ("set/shard-00000.safetensors", "set/shard-00001.safetensors", "x.npz"):
                store.put(name, f"{next(numbers):8}".encode() * 32_000)

    store.middle.spans.clear()
    store.middle.answer = put


FAULTS: dict[str, tuple[Callable[[Store], object], str, str]] = {
    "refuses": (lambda s: setattr(s.middle, "status", 403), "SOURCE_READ", "server refuses"),
    "fails": (lambda s: setattr(s.middle, "status", 503), "SOURCE_READ", "answer as it should"),
    "is silent": (lambda s: setattr(s.middle, "silence", 9), "SOURCE_READ", "no answer in 2 sec"),
    "breaks off": (break_off, "SOURCE_READ", "answer as it should"),
    "changes": (change, "SOURCE_CHANGED", "changed on the server|digest"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_midway_is_one_error(
    store: Store, data: go.Dataset, tmp_path: Path, fault: str, monkeypatch: Patch
) -> None:
    store.put("x.npz", bytes(range(256)) * 999)
    far = go.open_dataset(f"{store.address}/set", cache="1MB")
    before, (begin, code, words) = whole_files(tmp_path / "cache"), FAULTS[fault]
    monkeypatch.setattr(remote, "BLOCK_BYTES", 40_000)
    if fault == "is silent":
        monkeypatch.setattr(remote, "PATIENCE_SECONDS", 2)
        monkeypatch.setattr(remote, "LEAST_RATE", 1 << 30)
    begin(store)
    with one_error(code, words) as ranged:
        far.column("observations")
    store.middle.spans.clear()
    with one_error(code, words) as fetched:
        go.open_source(f"{store.address}/x.npz")
    for caught, name in ((ranged, "set/shard-0"), (fetched, "x.npz")):
        assert caught.value.where.startswith(f"{store.address}/{name}") and caught.value.remedy
        assert "SECRET" not in str(caught.value)
    new = set(whole_files(tmp_path / "cache")) - set(before)
    assert all(len(name) == 32 for name in new)  # blocks, compared

    middle = store.middle
    middle.status = middle.silence = 0
    middle.most, middle.answer = None, lambda path: None
    if fault != "changes":  # it goes on
        np.testing.assert_array_equal(far.column("actions"), data.column("actions"))
        place = remote.fetch_file(f"{store.address}/x.npz", "SOURCE_READ")
        assert place.read_bytes() == bytes(range(256)) * 999


def test_a_package_prints_no_traceback(store: Store, monkeypatch: Patch) -> None:
    store.put("x.npz", b"12345678")
    store.middle.status, log = 503, io.StringIO()
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(log))
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    with one_error("SOURCE_READ", "answer as it should"):
        go.open_source(f"{store.address}/x.npz")
    assert "Traceback" not in log.getvalue()


def test_a_redirect_gets_no_secrets(store: Store, tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "data.hdf5")
    store.put("data.hdf5", file.read_bytes())
    other = Middleman(store.middle.upstream)
    threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
    store.middle.elsewhere = other.url.replace("127.0.0.1", "localhost")
    address = f"{store.address}/data.hdf5"
    if store.redirects:
        local = go.convert(file, tmp_path / "near", quiet=True)
        assert go.convert(address, tmp_path / "far", quiet=True).shards == local.shards
        assert other.headers
    else:
        with one_error("SOURCE_READ", "refuses|answer as it should") as caught:
            go.open_source(address)
        assert "SECRET" not in str(caught.value)
    asked = "".join(other.headers)
    assert "SECRET" not in asked and "Authorization" not in asked
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not any(b"SECRET" in path.read_bytes() for path in files)
    other.shutdown()
    other.server_close()
