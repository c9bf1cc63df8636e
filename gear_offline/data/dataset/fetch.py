"""Datasets of GEAR shards on the Hugging Face Hub or another server: fetch, or open ranges."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from gear_offline.core import hub
from gear_offline.core.address import check_address, hide_secrets, join_address, parse_address
from gear_offline.core.files import read_regular, turn_of, write_file, writing
from gear_offline.core.remote import cache_folder, download, fetch_file
from gear_offline.data.dataset.manifest import (
    ADMISSIONS_NAME,
    MANIFEST_NAME,
    MAX_ADMISSIONS_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardRecord,
    read_admissions,
)
from gear_offline.data.dataset.ranges import BlockCache, Ranges, largest_block
from gear_offline.data.dataset.shard import LocalFile
from gear_offline.data.dataset.shard_file import ShardFile
from gear_offline.errors import InputError

CODE = "DATASET_NOT_FOUND"
READ_CACHE = 1 << 30  # bytes, for what reads all rows in their order


def fetch_dataset(path: str | os.PathLike[str], code: str = CODE) -> Path:
    """Return the directory that a remote dataset has on this machine, fetched as far as it lacks.

    Shards of an address are compared with their digests before they lie there.  Its folder is that
    of the manifest: another one on the server does not touch data that are in use.
    """
    address = parse_address(path)
    if address is None:
        return hub.fetch(str(path), "dataset", code)
    folder, manifest = _fetch_manifest(address, code)

    def check(file: Path, *, shard: ShardRecord) -> None:
        try:
            with LocalFile(file) as opened:
                shard_file = ShardFile(opened, folder, manifest, shard)
                shard_file.read_episodes()
                shard_file.compare()
        except InputError as error:
            where = join_address(address, shard.name)
            remedy = "put the dataset on the server again"
            raise InputError(error.code, error.problem, where, remedy) from error

    for shard in manifest.shards:
        if not (folder / shard.name).is_file():
            download(
                join_address(address, shard.name),
                folder / shard.name,
                code,
                size=shard.bytes,
                check=partial(check, shard=shard),
            )
    return folder


def fetch_manifest(path: str | os.PathLike[str]) -> Path:
    """Return a directory with the manifest of a remote dataset, and with shards or without."""
    address = parse_address(path)
    return fetch_dataset(path) if address is None else _fetch_manifest(address, CODE)[0]


def open_ranges(
    path: str | os.PathLike[str], cache: int | None, code: str = CODE
) -> tuple[Path, Ranges | None]:
    """Return a directory with a dataset's manifest, and its shards, read by ranges.

    The cache, of `cache` bytes, belongs to the address.  With None it has room for two blocks of
    each column, at least `READ_CACHE`, and keeps what it has; shards that were all fetched before
    are read where they lie.
    """
    address = parse_address(path)
    if address is None:
        remedy = "leave `cache` out; a dataset on the Hub has one: hf://datasets/USER/NAME"
        raise InputError("USAGE", "a cache is for a dataset at an address", str(path), remedy)
    folder, manifest = _fetch_manifest(address, code)
    if cache is None and all((folder / shard.name).is_file() for shard in manifest.shards):
        return folder, None
    blocks = BlockCache(cache_folder(hide_secrets(address), "blocks"), cache or READ_CACHE)
    if cache is None:
        tensors = len(manifest.tensors(manifest.shards[0]))
        room = 2 * tensors * largest_block(manifest)
        blocks = replace(blocks, size=max(READ_CACHE, room, blocks.used))
    ranges = Ranges(address, blocks)
    ranges.check_size(manifest)
    ranges.cache.shrink()
    return folder, ranges


def _fetch_manifest(address: str, code: str) -> tuple[Path, Manifest]:
    """Return a folder of its own for a manifest and what was admitted, and both."""
    check_address(address, code)
    raw = _read(address, MANIFEST_NAME, code, most=MAX_MANIFEST_BYTES)
    manifest = Manifest.decode(raw, where=join_address(address, MANIFEST_NAME))
    folder = cache_folder(hide_secrets(address), raw)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        admissions = _read(address, ADMISSIONS_NAME, code, most=MAX_ADMISSIONS_BYTES)
    except InputError as error:
        if error.code != code:
            raise
        admissions = b""  # servers may refuse what is not there
    with turn_of(folder / MANIFEST_NAME, quiet=True), writing(folder):
        for name, content in ((ADMISSIONS_NAME, admissions), (MANIFEST_NAME, raw)):
            file = folder / name
            if not content:  # others were there before
                file.unlink(missing_ok=True)
            elif not file.is_file() or file.read_bytes() != content:  # else others may read it
                write_file(file, content)
    return folder, manifest.grown(read_admissions(folder)[0])


def _read(address: str, name: str, code: str, *, most: int) -> bytes:
    place = join_address(address, name)

    def read(file: Path) -> bytes:
        try:
            return read_regular(file, most=most)
        except (OSError, ValueError) as error:
            raise InputError("DATASET_DAMAGED", f"cannot read it: {error}", place) from error

    return read(fetch_file(place, code, check=read))
