"""A stand-in of the Hugging Face Hub: what huggingface_hub's own client asks of its HTTP API."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_stand_in"
LFS = (".safetensors", ".hdf5")  # as .gitattributes of a new repository says

Tree = dict[str, bytes]


class Repo:
    """Branches and commits, each the files by path."""

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.branches: dict[str, str] = {}
        self.commits: dict[str, Tree] = {}
        self.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, branch: str, tree: Tree) -> str:
        name = hashlib.sha1(repr((branch, tree, len(self.commits))).encode()).hexdigest()
        self.branches[branch], self.commits[name] = name, tree
        return name


class StandIn(ThreadingHTTPServer):
    """Serves repositories that lie in memory, ``models/USER/NAME`` and ``datasets/USER/NAME``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # of LFS, by SHA-256

    def files(self, name: str, branch: str = "main") -> Tree:
        repo = self.repos[name]
        return repo.commits[repo.branches[branch]]


class Refused(Exception):
    """An answer other than 200: status, the Hub's code of the error, what it says."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.out: dict[str, str] = {}
        try:
            status, answer = 200, self.answer(urlsplit(self.path).path)
        except Refused as refused:
            status, code, answer = refused.args
            self.out = {"X-Error-Code": code}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {**self.out, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_POST = do_PUT = do_HEAD = do_GET

    def answer(self, path: str) -> Any:
        if path.startswith("/lfs/"):
            self.server.blobs[path[5:]] = self.body
            assert hashlib.sha256(self.body).hexdigest() == path[5:]
            return {}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self.create(json.loads(self.body))
        found = re.fullmatch(r"/(api/)?(models/|datasets/)?([^/]+/[^/]+?)(?:\.git)?(/.*)?", path)
        if found is None or found[3].split("/")[0] == "api":
            raise Refused(404, "", {})  # the client asks for news of its own
        repo = self.server.repos.get((found[2] or "models/") + found[3])
        if repo is None or (repo.private and not self.is_known()):
            raise Refused(401, "RepoNotFound", {"error": "Repository not found"})
        what, _, rest = (found[4] or "/revision/main").strip("/").partition("/")
        revision, _, file = map(unquote, rest.partition("/"))
        if self.command in ("GET", "HEAD"):
            commit = repo.branches.get(revision, revision)
            if commit not in repo.commits:
                raise Refused(404, "RevisionNotFound", {"error": f"Invalid rev id: {revision}"})
            return self.read(what, found[3], commit, repo.commits[commit], file)
        self.must_be_known()
        return getattr(self, what)(repo, revision)

    def read(self, what: str, name: str, commit: str, tree: Tree, file: str) -> Any:
        if what == "revision":
            return {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in tree]}
        if what == "tree":
            return [entry(path, content) for path, content in tree.items()]
        if file not in tree:
            raise Refused(404, "EntryNotFound", {"error": "Entry not found"})
        facts = entry(file, tree[file])
        etag = facts.get("lfs", facts)["oid"]
        self.out = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"'}
        self.out["X-Linked-Size"] = str(len(tree[file]))
        return tree[file]

    def create(self, asked: dict[str, Any]) -> Any:
        self.must_be_known()
        kind, name = f"{asked.get('type') or 'model'}s/", f"{asked['organization']}/{asked['name']}"
        document = {"url": f"{self.server.url}/{kind.replace('models/', '')}{name}"}
        if kind + name in self.server.repos:
            raise Refused(409, "", {"error": "You already created this repo", **document})
        self.server.repos[kind + name] = Repo(private=asked.get("visibility") == "private")
        return document

    def branch(self, repo: Repo, name: str) -> Any:
        repo.branches.setdefault(name, repo.branches["main"])
        return {}

    def preupload(self, repo: Repo, revision: str) -> Any:
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS) else "regular" for path in paths}
        ignore = {"shouldIgnore": False}
        return {"files": [{"path": p, "uploadMode": mode, **ignore} for p, mode in modes.items()]}

    def info(self, repo: Repo, revision: str) -> Any:  # /info/lfs/objects/batch
        objects = json.loads(self.body)["objects"]
        for one in objects:
            one["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    def commit(self, repo: Repo, revision: str) -> Any:
        tree = dict(repo.commits[repo.branches[revision]])
        for line in map(json.loads, self.body.splitlines()[1:]):
            value = line["value"]
            regular = line["key"] == "file"
            content = base64.b64decode(value["content"]) if regular else None
            tree[value["path"]] = self.server.blobs[value["oid"]] if content is None else content
        name = repo.commit(revision, tree)
        return {"commitUrl": f"{self.server.url}/me/it/commit/{name}", "commitOid": name}

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def must_be_known(self) -> None:
        if not self.is_known():
            raise Refused(401, "", {"error": "Invalid username or password."})


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Return what a listing says of a file."""
    found = {"type": "file", "path": path, "size": len(content)}
    if path.endswith(LFS):
        oid = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
        content = oid.encode()
    return {**found, "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}


@contextmanager
def stand_in(cache: Path) -> Iterator[StandIn]:
    """Serve, with huggingface_hub of this process turned to it and logged in."""
    from huggingface_hub import constants

    server = StandIn()
    form = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": form}
    settings |= {"HF_HUB_CACHE": str(cache), "HF_TOKEN_PATH": str(cache / "no token")}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(constants, name, value)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
    server.shutdown()
    server.server_close()
