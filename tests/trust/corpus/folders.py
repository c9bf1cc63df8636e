"""Folders of HDF5 files, and datasets of GEAR shards, as sources of a conversion."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.trust.corpus import hdf5, manifests, shards
from tests.trust.corpus.case import FIXTURES, STEPS, Case, Make, good_dataset, good_hdf5

CONVERT = ("convert", "f", "out", "--quiet")
FIRST, SECOND = "part_2.hdf5", "part_10.hdf5"
ROWS = np.arange(STEPS)


def case(
    name: str,
    code: str,
    make: Make,
    *options: str,
    says: str = "",
    arguments: Sequence[str] = (),
    kind: str = "folder",
    place: str = "f",
) -> Case:
    return Case(
        name=f"{kind}/{name}",
        code=code,
        arguments=[*(arguments or ("convert", place, "out", "--quiet")), *options],
        make=make,
        says=(says or place) if code else "",
    )


source = partial(case, kind="source", place="d")


def only(make: Callable[[Path], object]) -> Make:
    def spoil(folder: Path) -> None:
        (folder / "f").mkdir()
        make(folder / "f")

    return spoil


def beside(make: Callable[[Path], object]) -> Make:
    """Two files: a good one, and what `make` does in their folder."""

    def both(folder: Path) -> None:
        good_hdf5(folder / FIRST)
        make(folder)

    return only(both)


def second(**changes: Any) -> Make:
    """Two good files but for these columns of the second."""
    return beside(lambda f: good_hdf5(f / SECOND, **changes))


def named(name: str | bytes) -> Make:
    """A second good file under an odd name."""
    return beside(lambda f: os.rename(good_hdf5(f / "x"), os.path.join(os.fsencode(f), _raw(name))))


def _raw(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode()


def both(make: Callable[[Path], object]) -> Make:
    """A good file beside what passes for a manifest."""
    return beside(lambda f: make(f / "manifest.json"))


def dataset(make: Callable[[Path], object] = lambda path: None) -> Make:
    return lambda folder: make(good_dataset(folder))


def instead(make: Callable[[Path], object]) -> Make:
    """What passes for a manifest in place of that of a dataset."""

    def spoil(path: Path) -> None:
        (path / "manifest.json").unlink()
        make(path / "manifest.json")

    return dataset(spoil)


def linked(folder: Path) -> None:
    (folder / "d").symlink_to(FIXTURES / "v1")


def deeper(folder: Path) -> None:
    (folder / "g").mkdir()
    good_hdf5(folder / "g" / "x.h5")


# A file that is no good alone is no good in a folder; left out are those that are slow to make,
# that need options or more files, and more of a kind.
LEFT_OUT = (
    *("bomb", "nested", "many-objects", "no-such-file", "column", "rule", "good", "large"),
    *("virtual", "external-link", "complex-rewards", "observations-", "actions-", "infos/"),
)
GONE = ("directory", "pipe", "socket", "device", "dangling", "link-loop")  # no files: passed over
ALONE = tuple(
    Case(
        name=f"folder/one-{one.name.removeprefix('hdf5/')}",
        code="" if one.name.removeprefix("hdf5/") in GONE else one.code,
        arguments=CONVERT,
        make=beside(one.make),
        says="" if one.name.removeprefix("hdf5/") in GONE else one.says,
    )
    for one in hdf5.CASES
    if not any(part in one.name for part in LEFT_OUT)
)
# What `inspect` refuses is no source either.
REFUSED = tuple(
    Case(
        name=f"source/{one.name.replace('/', '-')}",
        code=one.code,
        arguments=("convert", "d", "out", "--quiet"),
        make=one.make,
        says=one.says,
    )
    for one in (*shards.CASES, *manifests.CASES[::4])
    if list(one.arguments) == ["inspect", "d", "--json"]
    and one.code not in ("DATASET_KIND", "DATASET_MISSING")  # then it may be another source
    and (one.code != "FILE_KIND" or not one.name.startswith("manifest/"))
)

CASES: tuple[Case, ...] = (
    case("missing", "SOURCE_UNKNOWN", lambda folder: None),
    case("empty", "SOURCE_UNKNOWN", only(lambda f: None)),
    case("other-files", "SOURCE_UNKNOWN", only(lambda f: (f / "x.npz").write_bytes(b"PK"))),
    case("hidden-files", "SOURCE_UNKNOWN", only(lambda f: good_hdf5(f / ".x.hdf5"))),
    case("folders-alone", "SOURCE_UNKNOWN", only(lambda f: (f / "x.hdf5").mkdir())),
    case("pipes-alone", "SOURCE_UNKNOWN", only(lambda f: os.mkfifo(f / "x.hdf5"))),
    case("deeper", "SOURCE_UNKNOWN", only(deeper)),
    case("loop", "SOURCE_UNKNOWN", lambda folder: (folder / "f").symlink_to("f")),
    case("dtypes", "SOURCE_JOIN", second(actions=np.zeros((STEPS, 3), "f8")), says="actions"),
    case("shapes", "SOURCE_JOIN", second(actions=np.zeros((STEPS, 5), "f4")), says="actions"),
    case("second-text", "HDF5_UNREADABLE", beside(lambda f: (f / SECOND).write_text("x"))),
    case("second-nan", "NONFINITE", second(rewards=np.full(STEPS, np.nan, "f4")), says="rewards"),
    case("second-no-rewards", "COLUMN_MISSING", second(rewards=None), says=SECOND),
    case("second-no-ends", "COLUMN_MISSING", second(terminals=None, timeouts=None)),
    case("passwd", "HDF5_UNREADABLE", beside(lambda f: (f / SECOND).symlink_to("/etc/passwd"))),
    case("rule-unknown", "RULE_UNKNOWN", second(), "--rule", "now and then", says="now and then"),
    case("rule-flag", "RULE_FLAG", second(), "--rule", "truncations", says=FIRST),
    case("columns-unknown", "COLUMN_MISSING", second(), "--columns", "nope", says="nope"),
    case("onto-itself", "TARGET_KIND", second(), arguments=("convert", "f", "f", "--quiet")),
    case("onto-a-file", "TARGET_KIND", second(), arguments=("convert", "f", f"f/{FIRST}", "-q")),
    case("good-manifest-text", "", both(lambda p: p.write_text("x"))),
    case("good", "", second()),
    case("good-one-file", "", only(lambda f: good_hdf5(f / "x.H5"))),
    case("good-other-columns", "", second(extra=ROWS)),
    case("good-inside", "", second(), arguments=("convert", "f", "f/out", "--quiet")),
    case("good-manifest-folder", "", both(lambda p: p.mkdir())),
    case("good-manifest-pipe", "", both(os.mkfifo)),
    case("good-name-escape", "", named("x\x1b[2J.hdf5")),
    case("good-name-newline", "", named("a\nb.hdf5")),
    case("good-name-bytes", "", named(b"\xff\xfe.hdf5")),
    case("good-name-digits", "", named("\N{SUPERSCRIPT TWO}" + "9" * 200 + ".hdf5")),
    source("missing-shard", "FILE_MISSING", dataset(lambda p: (p / shards.OTHER).unlink())),
    source("onto-itself", "TARGET_EXISTS", dataset(), arguments=("convert", "d", "d", "--quiet")),
    source("rule", "RULE_UNKNOWN", dataset(), "--rule", "terminals", says="terminals"),
    source("columns-unknown", "COLUMN_MISSING", dataset(), "--columns", "nope", says="nope"),
    source("an-empty-folder", "SOURCE_UNKNOWN", lambda folder: (folder / "d").mkdir()),
    source("a-text", "HDF5_UNREADABLE", lambda folder: (folder / "d").write_text("x")),
    source("manifest-pipe", "SOURCE_UNKNOWN", instead(os.mkfifo)),
    source("manifest-folder", "SOURCE_UNKNOWN", instead(lambda p: p.mkdir())),
    source("manifest-device", "SOURCE_UNKNOWN", instead(lambda p: p.symlink_to("/dev/zero"))),
    source("manifest-passwd", "FILE_KIND", instead(lambda p: p.symlink_to("/etc/passwd"))),
    source("columns-sum", "COLUMN_MISSING", dataset(), "--columns", "observations=nope+actions"),
    source("good", "", dataset()),
    source("good-link", "", linked),
    source("good-inside", "", dataset(), arguments=("convert", "d", "d/out", "--quiet")),
    source("good-few-columns", "", dataset(), "--columns", "rewards"),
    source("good-shard-size", "", dataset(), "--shard-size", "1KB"),
    *ALONE,
    *REFUSED,
)
