"""The Hugging Face Hub: fetch from ``hub:USER/NAME``, and put there.

Nothing of it is executed; whoever opens a download checks it, as any other file from outside.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from gear_offline.core.files import write_error
from gear_offline.core.text import first_line, markdown
from gear_offline.errors import NO_SPACE, InputError, UnavailableError

Kind = Literal["model", "dataset"]
PREFIX = "hub:"
FORM = "write it like hub:USER/NAME, hub:USER/NAME/FOLDER or hub:USER/NAME@REVISION"
_NAME = re.compile(r"(?:hub:)?([\w.-]+/[\w.-]+)(?:/([^@]+))?(?:@(\S+))?", re.ASCII)


def is_hub(path: object) -> bool:
    return isinstance(path, str | Path) and str(path).startswith(PREFIX)


def fetch(name: str, repo_type: Kind, code: str, *, only: tuple[str, ...] = ()) -> Path:
    """Fetch ``hub:USER/NAME/FOLDER@REVISION``; return its place in huggingface_hub's cache.

    `code` is that of errors, `only` patterns of the files to fetch where there is no folder.
    """
    from huggingface_hub import snapshot_download

    repo, inner, revision = split_name(name, code)
    patterns = [glob.escape(inner + end) for end in ("", "/")] if inner else [*only] or None
    options: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
    with _hub_errors(name, repo_type, code):
        path = Path(snapshot_download(repo, repo_type=repo_type, **options), inner or "")
    if not path.exists():
        problem, remedy = f"the {repo_type} {repo} has no {inner or only[0]}", "look at its files"
        raise InputError(code, problem, where=name, remedy=remedy)
    return path


def put(files: Mapping[str, Any], name: str, repo_type: Kind, *, private: bool = False) -> str:
    """Put paths or bytes into a repository, made if it is missing; return its address.

    It is one commit; ``OUTPUT_WRITE``.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    repo, inner, revision = split_name(name, "OUTPUT_WRITE")
    api = HfApi()
    with _hub_errors(name, repo_type, "OUTPUT_WRITE"):
        address = api.create_repo(repo, repo_type=repo_type, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, repo_type=repo_type, exist_ok=True)
        added = [CommitOperationAdd(f"{inner or '.'}/{file}", files[file]) for file in files]
        options: dict[str, Any] = {"repo_type": repo_type, "revision": revision}
        message = f"Upload a {repo_type} with gear-offline"
        api.create_commit(repo, added, commit_message=message, **options)
    return str(address)


def card(metadata: Mapping[str, Any], title: str, facts: Mapping[str, Any], body: str) -> bytes:
    """Return a README.md as the Hub shows it; what is None is left out."""
    head = yaml.safe_dump({k: v for k, v in metadata.items() if v is not None}, sort_keys=False)
    texts = {name: str(value) for name, value in facts.items() if value is not None}
    lines = [f"- {name}: {markdown(text)}" for name, text in texts.items()]
    return "\n".join([f"---\n{head}---\n\n# {markdown(title)}\n", *lines, "", body, ""]).encode()


def split_name(name: str, code: str) -> tuple[str, str | None, str | None]:
    """Return repository, folder in it and revision of ``hub:USER/NAME/FOLDER@REVISION``."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in (match[2] or "").split("/"):
        raise InputError(code, f"{name!r} is no name on the Hub", remedy=FORM)
    return match[1], match[2], match[3]


@contextmanager
def _hub_errors(name: str, repo_type: Kind, code: str) -> Iterator[None]:
    """Raise what huggingface_hub finds as one error: not there, no token, no network."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # each layer of the client has its own: HTTP, LFS, Xet
        status = getattr(getattr(error, "response", None), "status_code", 0)
        reason = getattr(error, "server_message", None) or first_line(error)
        login = "log in: hf auth login, or set HF_TOKEN"
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise write_error(error, name) from error
        if isinstance(error, errors.HFValidationError):
            problem, remedy = f"no {repo_type} can have this name", FORM
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = f"the {repo_type} has no such revision"
            remedy = "name a branch, a tag or a commit"
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = f"the Hub has no such {repo_type}, or does not show it"
            remedy = f"check the name; to see what is private, {login}"
        elif status in (401, 403):
            problem, remedy = f"the Hub refuses: {reason}", f"with a token that may write, {login}"
        else:
            problem = f"the Hub does not answer as it should: {reason}"
            remedy = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE; then try again"
            raise UnavailableError(code, problem, where=name, remedy=remedy) from error
        raise InputError(code, problem, where=name, remedy=remedy) from error
