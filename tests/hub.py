"""A stand-in of the Hugging Face Hub: what huggingface_hub's own client asks of its HTTP API."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_stand_in"
LFS = ("*.safetensors", "*.hdf5", "*.parquet")  # as .gitattributes of a new repository says

Tree = dict[str, bytes]


@dataclass
class Repo:
    """Branches and commits, each the files by path."""

    name: str
    url: str
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Tree] = field(default_factory=dict)

    def commit(self, branch: str, tree: Tree) -> str:
        sha = hashlib.sha1(repr((branch, sorted(tree.items()), len(self.commits))).encode())
        self.branches[branch] = sha.hexdigest()
        self.commits[sha.hexdigest()] = tree
        return sha.hexdigest()


class StandIn(ThreadingHTTPServer):
    """Serves repositories that lie in memory, ``model/USER/NAME`` and ``dataset/USER/NAME``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # of LFS, by SHA-256

    def files(self, name: str, branch: str = "main") -> Tree:
        repo = self.repos[name]
        return repo.commits[repo.branches[branch]]


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str = "", message: str = "", **more: str) -> None:
        self.status, self.document = status, {"error": message, **more}
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers: dict[str, str] = {}
        try:
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            answer = self.answer(parts, headers)
            status = 200
        except Refused as refused:
            status, answer, headers = refused.status, refused.document, refused.headers
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_POST = do_PUT = do_HEAD = do_GET

    def answer(self, parts: list[str], headers: dict[str, str]) -> Any:
        if parts[0] == "lfs":
            assert hashlib.sha256(self.body).hexdigest() == parts[1]
            self.server.blobs[parts[1]] = self.body
            return {}
        if parts[:2] == ["api", "validate-yaml"]:
            return {"errors": [], "warnings": []}
        if parts[:2] == ["api", "repos"]:
            return self.create(json.loads(self.body))
        if parts[0] == "api" and parts[1] not in ("models", "datasets"):
            raise Refused(404)  # the client asks for news of its own
        if parts[0] == "api":
            kind, user, name, *rest = parts[1:]
            return self.api(self.repo(kind[:-1], user, name), rest)
        kind = "dataset" if parts[0] == "datasets" else "model"
        user, name, *rest = parts[1:] if kind == "dataset" else parts
        repo = self.repo(kind, user, name.removesuffix(".git"))
        if rest[:2] == ["info", "lfs"]:
            self.must_write()
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}}
                for o in json.loads(self.body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        assert rest[0] == "resolve"
        sha, tree = self.tree(repo, rest[1])
        path = "/".join(rest[2:])
        if path not in tree:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers |= {"X-Repo-Commit": sha, "ETag": f'"{entry(path, tree[path])["oid"]}"'}
        if is_lfs(path):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(tree[path]).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(tree[path]))
        return tree[path]

    def api(self, repo: Repo, rest: list[str]) -> Any:
        if not rest or rest[0] == "revision":
            sha, tree = self.tree(repo, rest[1] if rest else "main")
            siblings = [{"rfilename": path} for path in tree]
            found = {"id": repo.name, "sha": sha, "siblings": siblings}
            return found | {"private": repo.private, "tags": [], "downloads": 0, "likes": 0}
        if rest[0] == "tree":
            _, tree = self.tree(repo, rest[1])
            return [entry(path, content) for path, content in tree.items()]
        self.must_write()
        if rest[0] == "branch":
            repo.branches.setdefault(rest[1], repo.branches["main"])
            return {}
        if rest[0] == "preupload":
            asked = [file["path"] for file in json.loads(self.body)["files"]]
            modes = {True: "lfs", False: "regular"}
            modes_of = {path: modes[is_lfs(path)] for path in asked}
            files = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False}
                for path, mode in modes_of.items()
            ]
            return {"files": files}
        assert rest[0] == "commit"
        tree = dict(self.tree(repo, rest[1])[1])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                tree[value["path"]] = self.server.blobs[value["oid"]]
        sha = repo.commit(rest[1], tree)
        return {"commitUrl": f"{repo.url}/commit/{sha}", "commitOid": sha}

    def create(self, asked: dict[str, Any]) -> Any:
        self.must_write()
        kind, name = asked.get("type") or "model", f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if f"{kind}/{name}" in self.server.repos:
            raise Refused(409, "", "You already created this repo", url=url)
        repo = Repo(name, url, private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.server.repos[f"{kind}/{name}"] = repo
        return {"url": url, "name": name, "id": "0"}

    def repo(self, kind: str, user: str, name: str) -> Repo:
        repo = self.server.repos.get(f"{kind}/{user}/{name}")
        if repo is None or (repo.private and not self.may_write()):
            raise Refused(401, "RepoNotFound", "Repository not found")
        return repo

    def tree(self, repo: Repo, revision: str) -> tuple[str, Tree]:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repo.commits[sha]

    def may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def must_write(self) -> None:
        if not self.may_write():
            raise Refused(401, "", "Invalid username or password.")


def is_lfs(path: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in LFS)


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Return what a listing says of a file."""
    found = {"type": "file", "path": path, "size": len(content)}
    sha = hashlib.sha256(content).hexdigest()
    if is_lfs(path):
        found["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
        content = f"version https://git-lfs\noid sha256:{sha}\nsize {len(content)}\n".encode()
    return {**found, "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}


@contextmanager
def stand_in(cache: Path) -> Iterator[StandIn]:
    """Serve, with huggingface_hub of this process turned to it and logged in."""
    from huggingface_hub import constants

    server = StandIn()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        form = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
        patch.setenv("HF_TOKEN", TOKEN)
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()
