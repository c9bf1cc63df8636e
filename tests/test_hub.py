"""The Hub through huggingface_hub's own client, against a stand-in of its HTTP API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import h5py
import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.runs.data import prepare_dataset
from tests.checkpoint_support import write_run
from tests.support import Captured, Patch, make_dataset, one_error, run_python, write_hdf5


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandIn]:
    """Serve, with huggingface_hub of this process turned to it and logged in."""
    server, cache = StandIn(), tmp_path / "cache"
    form = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings: dict[str, Any] = {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": form}
    settings |= {"HF_HUB_CACHE": str(cache), "HF_TOKEN_PATH": str(cache / "no token")}
    settings |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(huggingface_hub.constants, name, value)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "pend-s0")


def test_a_policy_goes_there_and_acts_elsewhere(
    hub: StandIn, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    policy = go.load_policy(run, checkpoint="best", device="cpu")
    assert policy.push_to_hub("hub:me/pend") == f"{hub.url}/me/pend"
    assert main(["push", str(run), "hub:me/pend@last", "--private"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/me/pend\n"
    weights = hub.files("models/me/pend")["model.safetensors"]
    assert weights != hub.files("models/me/pend", "last")["model.safetensors"]
    best = (run / "checkpoints" / "best" / "model.safetensors").read_bytes()
    assert weights == best

    loaded = go.load_policy("me/pend", device="cpu")
    assert (loaded.facts.step, go.load_policy("me/pend", revision="last").facts.step) == (10, 20)
    for one in (policy, loaded):
        one.reset(-200.0)
    seen = np.ones((1, 3))
    np.testing.assert_array_equal(loaded.act(seen), policy.act(seen))
    released = DecisionTransformerModel.from_pretrained("me/pend")
    ours = go.DecisionTransformer.from_pretrained("me/pend").state_dict()
    for name, weight in released.state_dict().items():
        torch.testing.assert_close(weight, ours[name], rtol=0, atol=0)
        torch.testing.assert_close(weight, policy.model.state_dict()[name], rtol=0, atol=0)

    out = tmp_path / "result.json"
    words = "evaluate hub:me/pend@last --env Pendulum-v1 --targets -200 --episodes 1 --seed 3 -q"
    assert main([*words.split(), "--out", str(out)]) == 0
    expected = go.evaluate(run, targets=-200, episodes=1, out=tmp_path / "again.json", quiet=True)
    assert json.loads(out.read_text())["return"] == expected.mean_return


def test_the_card_is_what_the_hub_reads(hub: StandIn, run: Path) -> None:
    go.load_policy(run, checkpoint="best", device="cpu").push_to_hub("me/unplayed")
    assert huggingface_hub.ModelCard.load("me/unplayed").data.eval_results is None
    achieved = go.evaluate(run, episodes=2, targets=[-200.0], device="cpu", quiet=True)
    go.load_policy(run, device="cpu").push_to_hub("me/pend")
    card = huggingface_hub.ModelCard.load("me/pend")
    assert card.data.library_name == "gear-offline" and "Pendulum-v1" in card.data.tags
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("mean_reward", achieved.mean_return)
    assert 'go.load_policy("me/pend")' in card.text


def test_a_dataset_goes_there_and_is_read_from_there(
    hub: StandIn, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    data = make_dataset(tmp_path / "here", [9, 30, 4], shard_bytes=3000)
    assert main(["push", str(data.path), "hub:me/data"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/datasets/me/data\n"
    found = go.open_dataset("hub:me/data")
    assert found.verified and found.manifest.encode() == data.manifest.encode()
    np.testing.assert_array_equal(found.column("observations"), data.column("observations"))
    assert main(["inspect", "hub:me/data", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 43
    _, metadata, text = (found.path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata)["task_categories"] == ["reinforcement-learning"]
    assert 'go.open_dataset("hub:me/data")' in text

    assert main(["convert", "hub:me/data", str(tmp_path / "copy"), "-q"]) == 0
    copy = go.open_dataset(tmp_path / "copy")
    assert copy.manifest.source.uri == "hub:me/data"
    np.testing.assert_array_equal(copy.column("rewards"), data.column("rewards"))

    # workers read what this process has fetched: theirs would find no server here
    options: dict[str, Any] = {"workers": 2, "shard_bytes": 3000, "quiet": True}
    manifest = go.convert("hub:me/data", tmp_path / "by two", **options)
    assert manifest.shards == data.manifest.shards

    def read(folder: Path) -> Iterator[dict[str, Any]]:
        for file in sorted(folder.glob("shard-*")):
            rows = np.full((2, 1), file.stat().st_size)
            yield {"observations": rows, "actions": rows, "rewards": rows[:, 0]}

    with go.open_source("hub:me/data", reader=read) as source:
        sizes = [f.stat().st_size for f in sorted(data.path.glob("shard-*"))]
        assert sizes and source.read("rewards", 0, source.spec.steps).tolist()[::2] == sizes

    monkeypatch.chdir(tmp_path)
    for options in ({"path": "hub:me/data"}, {"path": "copy", "source": "hub:me/data"}):
        recipe = go.load_recipe("paper", {f"data.{key}": text for key, text in options.items()})
        assert len(prepare_dataset(recipe, quiet=True).episodes.lengths) == 3
    other = go.load_recipe("paper", {"data.path": "copy", "data.source": "hub:me/other"})
    with one_error("DATA_MISMATCH"):
        prepare_dataset(other, quiet=True)

    repo = hub.repos["datasets/me/data"]
    broken = {**hub.files("datasets/me/data")}
    broken["shard-00000.safetensors"] = broken["shard-00000.safetensors"][:-1] + b"?"
    repo.commit("broken", broken)
    with one_error("DATASET_DAMAGED"):
        go.open_dataset("hub:me/data@broken")


def read_rewards(path: Path, seed: int) -> Any:
    """Return the rewards of a D4RL file that is written there."""
    with h5py.File(write_hdf5(path, episodes=2, seed=seed)) as file:
        return file["rewards"][:]


def test_files_of_another_kind_are_converted(hub: StandIn, tmp_path: Path) -> None:
    odd = "medium [1] ä%20#?x"
    (tmp_path / "raw" / odd).mkdir(parents=True)
    rewards = [read_rewards(tmp_path / "raw" / odd / f"{n}.hdf5", n) for n in (0, 1)]
    (tmp_path / "raw" / "other.bin").write_bytes(b"not asked for")
    api = huggingface_hub.HfApi()
    api.create_repo("me/raw", repo_type="dataset")
    api.upload_folder(repo_id="me/raw", repo_type="dataset", folder_path=tmp_path / "raw")
    names = {f"hub:me/raw/{odd}": rewards, f"hub:me/raw/{odd}/1.hdf5@main": rewards[1:]}
    for name, some in names.items():
        manifest = go.convert(name, tmp_path / str(len(some)), quiet=True)
        assert manifest.source.uri == name
        found = go.open_dataset(tmp_path / str(len(some))).column("rewards")
        np.testing.assert_array_equal(found, np.concatenate(some))
    assert not list((tmp_path / "cache").rglob("other.bin"))


NOT_THERE = {
    "hub:me/none": "no such model, or does not show it",
    "none/at-all": "hub:none/at-all",
    "hub:me/secret": "log in: hf auth login, or set HF_TOKEN",
    "hub:me/pend@nope": "no such revision",
    "hub:me/empty": "has no policy.json",
    "hub:me": "is no name on the Hub",
    "hub:me/pend/../..": "is no name on the Hub",
    "hub:me/a..b": "can have this name",
}


def test_what_is_not_there_or_not_reached_is_one_error(
    hub: StandIn, run: Path, monkeypatch: Patch
) -> None:
    policy = go.load_policy(run, device="cpu")
    policy.push_to_hub("me/pend")
    huggingface_hub.HfApi().create_repo("me/secret", private=True)
    huggingface_hub.HfApi().create_repo("me/empty")
    for token in ("wrong", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        with one_error("OUTPUT_WRITE", "refuses") as caught:
            policy.push_to_hub("me/pend")
        assert "HF_TOKEN" in caught.value.remedy
    monkeypatch.delenv("HF_TOKEN")
    for name, what in NOT_THERE.items():
        with one_error("RUN_NOT_FOUND", re.escape(what)):
            go.load_policy(name, device="cpu")
    go.load_policy("me/pend", device="cpu")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert go.load_policy("me/pend", device="cpu").facts.step == 20, "it was fetched before"
    for call, code in (
        (lambda: go.load_policy("me/new", device="cpu"), "RUN_NOT_FOUND"),
        (lambda: go.open_dataset("hub:me/new"), "DATASET_NOT_FOUND"),
        (lambda: go.open_source("hub:me/new"), "SOURCE_READ"),
        (lambda: policy.push_to_hub("me/pend"), "OUTPUT_WRITE"),
    ):
        with pytest.raises(go.UnavailableError, match="does not answer") as unreachable:
            call()
        assert unreachable.value.code == code and "check the network" in unreachable.value.remedy


def test_a_folder_here_wins_and_a_path_is_never_asked_for_there(
    hub: StandIn, run: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    go.load_policy(run, device="cpu").push_to_hub("me/pend")
    go.load_policy(run, checkpoint="best", device="cpu").save("me/pend")
    assert go.load_policy("me/pend", device="cpu").facts.step == 10
    assert go.load_policy("hub:me/pend", device="cpu").facts.step == 20
    hub.shutdown()
    for name in ("me/other", Path("you/other")):
        with one_error("RUN_NOT_FOUND", "no such run"):
            go.load_policy(name)


def test_a_process_of_its_own_finds_the_hub_by_the_environment(
    hub: StandIn, tmp_path: Path
) -> None:
    data = make_dataset(tmp_path, [9, 30, 4])
    assert main(["push", str(data.path), "hub:me/data", "--private"]) == 0
    (tmp_path / "home").mkdir()
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    variables["HF_HOME"] = str(tmp_path / "home")
    words = ("-m", "gear_offline", "convert", "hub:me/data", tmp_path / "copy")
    run_python(*words, variables=variables, check=True)
    assert go.open_dataset(tmp_path / "copy").episodes.lengths.tolist() == [9, 30, 4]


TOKEN = "hf_stand_in"
Tree = dict[str, bytes]


@dataclass
class Repo:
    """Branches and commits, each the files by path."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Tree] = field(default_factory=dict)

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
        if (span := self.headers.get("Range")) and isinstance(answer, bytes):
            begin, end = (int(number or len(content)) for number in span[6:].split("-"))
            status, content = 206, content[begin : end + 1]
        self.send_response(status)
        for key, value in {**self.out, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_POST = do_PUT = do_HEAD = do_GET

    def answer(self, path: str) -> Any:
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
        if what == "paths-info":
            tree = repo.commits[repo.branches[revision]]
            paths = parse_qs(self.body.decode()).get("paths", [])
            return [entry(path, tree[path]) for path in paths if path in tree]
        self.must_be_known()
        return getattr(self, what)(repo, revision)

    def read(self, what: str, name: str, commit: str, tree: Tree, file: str) -> Any:
        if what == "revision":
            return {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in tree]}
        if what == "tree":
            return [entry(path, content) for path, content in tree.items()]
        if file not in tree:
            raise Refused(404, "EntryNotFound", {"error": "Entry not found"})
        etag = hashlib.sha256(tree[file]).hexdigest()
        self.out = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"'}
        self.out["X-Linked-Size"] = str(len(tree[file]))
        return tree[file]

    def create(self, asked: dict[str, Any]) -> Any:
        self.must_be_known()
        kind, name = f"{asked.get('type') or 'model'}s/", f"{asked['organization']}/{asked['name']}"
        document = {"url": f"{self.server.url}/{kind.replace('models/', '')}{name}"}
        if kind + name in self.server.repos:
            raise Refused(409, "", {"error": "You already created this repo", **document})
        repo = self.server.repos[kind + name] = Repo(asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b""})
        return document

    def branch(self, repo: Repo, name: str) -> Any:
        repo.branches.setdefault(name, repo.branches["main"])
        return {}

    def preupload(self, repo: Repo, revision: str) -> Any:
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        every = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": path, **every} for path in paths]}

    def commit(self, repo: Repo, revision: str) -> Any:
        tree = dict(repo.commits[repo.branches[revision]])
        for line in map(json.loads, self.body.splitlines()[1:]):
            tree[line["value"]["path"]] = b64decode(line["value"]["content"])
        name = repo.commit(revision, tree)
        return {"commitUrl": f"{self.server.url}/me/it/commit/{name}", "commitOid": name}

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def must_be_known(self) -> None:
        if not self.is_known():
            raise Refused(401, "", {"error": "Invalid username or password."})


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Return what a listing says of a file."""
    size, oid = len(content), hashlib.sha256(content).hexdigest()
    lfs = {"oid": oid, "size": size, "pointerSize": 130}
    return {"type": "file", "path": path, "size": size, "oid": oid, "lfs": lfs}
