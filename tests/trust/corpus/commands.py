"""Command lines that cannot be meant, and targets that must not be touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.trust.corpus.case import Case, Make, good_dataset, good_hdf5


def case(
    name: str, code: str, arguments: Sequence[str], make: Make = lambda f: None, says: str = ""
) -> Case:
    return Case(name=f"command/{name}", code=code, arguments=arguments, make=make, says=says)


def convert(name: str, code: str, *options: str, make: Make | None = None, says: str = "") -> Case:
    arguments = ["convert", "x.hdf5", "out", "--quiet", *options]
    return case(name, code, arguments, make or (lambda f: good_hdf5(f / "x.hdf5")), says)


def occupied(folder: Path) -> None:
    good_hdf5(folder / "x.hdf5")
    good_dataset(folder).rename(folder / "out")


def foreign(folder: Path) -> None:
    good_hdf5(folder / "x.hdf5")
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("ten years of work")


def disguised(folder: Path) -> None:
    occupied(folder)
    (folder / "out" / "thesis.tex").write_text("ten years of work")


def a_file(folder: Path) -> None:
    good_hdf5(folder / "x.hdf5")
    (folder / "out").write_text("x")


USAGE: dict[str, Sequence[str]] = {
    "unknown-command": ["trian"],
    "unknown-option": ["inspect", "d", "--fast"],
    "missing-argument": ["convert"],
    "one-argument": ["convert", "x.hdf5"],
    "too-many-arguments": ["inspect", "a", "b"],
    "option-without-value": ["convert", "a", "b", "--workers"],
    "workers-zero": ["convert", "a", "b", "--workers", "0"],
    "workers-text": ["convert", "a", "b", "--workers", "two"],
    "workers-huge": ["convert", "a", "b", "--workers", "9" * 5000],
    "episodes-zero": ["evaluate", "run", "--episodes", "0"],
    "targets-text": ["evaluate", "run", "--targets", "high"],
    "mix-text": ["collect", "Hopper-v5", "x.hdf5", "--mix", "expert"],
    "unknown-subcommand": ["recipes", "delete"],
    "surrogate": ["\udcff\udcfe"],
    "long": ["x" * 100_000],
}
SIZES = ("", "0", "-1MiB", "1e400", "nan", "inf", "12QB", "MiB", "0x10", "9" * 5000)

CASES: tuple[Case, ...] = (
    *(case(name, "USAGE", arguments) for name, arguments in USAGE.items()),
    *(convert(f"size-{size[:8]}", "SIZE", f"--shard-size={size}") for size in SIZES),
    case("bench-unknown", "BENCH_NAME", ["bench", "speed"], says="speed"),
    case("source-empty", "SOURCE_UNKNOWN", ["convert", "", "out"]),
    case("source-nothing", "SOURCE_UNKNOWN", ["convert", "nothing", "out"], says="nothing"),
    case("source-url", "SOURCE_UNKNOWN", ["convert", "http://x/y", "out"], says="http"),
    case("source-root", "SOURCE_UNKNOWN", ["convert", "/", "out"], says="/"),
    case("source-long", "SOURCE_UNKNOWN", ["convert", "x" * 5000, "out"]),
    case("source-surrogate", "SOURCE_UNKNOWN", ["convert", "\udcff", "out"]),
    case("d4rl-unknown", "D4RL_NAME", ["convert", "d4rl:hooper-medium-v2", "o"], says="hooper"),
    case("d4rl-parent", "D4RL_NAME", ["convert", "d4rl:../../etc/passwd", "o"], says="etc"),
    case("minari-malformed", "MINARI_ID", ["convert", "minari:hopper", "o"], says="hopper"),
    case("minari-parent", "MINARI_ID", ["convert", "minari:../../x-v0", "o"], says="../"),
    case("minari-absolute", "MINARI_ID", ["convert", "minari:/etc/x-v0", "o"], says="/etc"),
    case("minari-missing", "MINARI_MISSING", ["convert", "minari:a/b-v0", "o"], says="a/b"),
    convert("target-exists", "TARGET_EXISTS", make=occupied, says="out"),
    convert("target-foreign", "TARGET_KIND", "--overwrite", make=foreign, says="out"),
    convert("target-disguised", "TARGET_KIND", "--overwrite", make=disguised, says="out"),
    convert("target-a-file", "TARGET_KIND", "--overwrite", make=a_file, says="out"),
    convert("reference-unknown", "REFERENCE_UNKNOWN", "--reference", "chess", says="chess"),
    case("copy-unknown", "RECIPE_NOT_FOUND", ["recipes", "cp", "papper"], says="paper"),
    case("copy-parent", "RECIPE_NOT_FOUND", ["recipes", "cp", "../paper"], says="paper"),
    case(
        "copy-exists",
        "RECIPE_EXISTS",
        ["recipes", "cp", "paper", "mine.yaml"],
        lambda f: (f / "mine.yaml").write_text("x"),
        says="mine.yaml",
    ),
    case("copy-nowhere", "RECIPE_WRITE", ["recipes", "cp", "paper", "a/b/c.yaml"], says="a/b"),
    case("validate-nothing", "RECIPE_NOT_FOUND", ["recipes", "validate", ""]),
    case("good-list", "", ["recipes", "ls"]),
)
