"""The command `gear-offline inspect`: a JSON-able document, and the same as tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from gear_offline.config.arguments import check_arguments
from gear_offline.core.progress import Progress, Terminal, print_table
from gear_offline.core.text import count_text, number_text, printable, size_text, texts
from gear_offline.data.dataset.dataset import HISTORIES, open_to_read
from gear_offline.data.dataset.manifest import Manifest
from gear_offline.data.dataset.shard import DIGEST_CHARS

MOST_LEFT_OUT = 8  # that `convert` names
LONGEST_TEXT = 300  # of what the source says; --json shows all
MOST_COLUMNS = 8  # without --full
_HEIGHTS = " ▁▂▃▄▅▆▇█"


@check_arguments()
def inspect(
    path: str | os.PathLike[str], *, verify: bool = True, quiet: bool = True
) -> dict[str, Any]:
    """Describe a dataset.

    Parameters
    ----------
    path, verify
        As `gear_offline.open_dataset`; of an address only what this needs is read, and compared.
    quiet
        Show no progress.

    Returns
    -------
    dict
        JSON-able: the manifest's keys (docs/reference/format.md); `path`, `bytes`, `verified`,
        `digests` (``{"blocks", "block_bytes", "checked"}``) and ``returns.left_out``: episodes
        whose return is NaN or infinite.
    """
    dataset = open_to_read(path)
    if verify:
        total = dataset.manifest.total_bytes + dataset.manifest.video_bytes
        title = f"verify {Path(path).name}"
        with Progress(title, total=total, unit="bytes", quiet=quiet) as progress:
            dataset = dataset.verify(on_progress=progress.advance)
    manifest = dataset.manifest.replace_fields(statistics=dict(dataset.statistics))
    document = manifest.document()
    digests = [joined for shard in manifest.shards for joined in shard.digests.values()]
    blocks = sum(map(len, digests)) // DIGEST_CHARS
    for row, column in zip(document["columns"], manifest.stored, strict=True):
        row["bytes"] = column.step_bytes * manifest.stored.steps
        if (kept := manifest.videos.get(column.name)) is not None:
            row |= {"dtype": kept.dtype, "shape": kept.shape}
    checked, episodes = blocks if dataset.verified else 0, manifest.episodes
    document["returns"]["left_out"] = episodes - manifest.returns.count
    document["endings"]["neither"] = episodes - sum(count for _, count in manifest.endings)
    seals = {"blocks": blocks, "block_bytes": manifest.block_bytes, "checked": checked}
    sizes = {"path": dataset.name, "bytes": manifest.total_bytes}
    return {**document, **sizes, "digests": seals, "verified": dataset.verified}


def print_inspection(
    document: Mapping[str, Any], *, full: bool = False, console: Terminal | None = None
) -> None:
    """Print a `document` that `inspect` returned, on a screen of 24 lines unless `full`."""
    console = console or Terminal()
    _print_facts(console, _facts(document, full))
    console.print()
    _print_columns(console, document, full)
    console.print()
    _print_facts(console, _endings(document))
    if not full:
        console.print("--full shows all columns and what the source says of itself", style="dim")


def summary(manifest: Manifest) -> list[str]:
    """Sum up a conversion in a line, and each warning of the source in one more."""
    spec, source, endings = manifest.spec, manifest.source, manifest.endings
    episodes, steps = count_text(spec.episodes, "episode"), count_text(spec.steps, "step")
    ends = f"{endings.terminated:,} terminated, {endings.truncated:,} truncated"
    stored = f"{count_text(len(manifest.shards), 'shard')}, {size_text(manifest.total_bytes)}"
    lines = [f"{episodes} ({ends}), {steps}, {stored}; rule {source.rule}"]
    if videos := manifest.document().get("videos"):
        lines.append(f"frames stay in videos: {_video_text(videos, manifest.steps)}")
    if HISTORIES in source.attributes:
        lines[0] += f"; histories by {source.attributes[HISTORIES]}"
    lines += [f"edited: {edit}" for edit in texts(source.attributes.get("edits"))]
    for name, column in manifest.statistics.items():
        if column.nonfinite:
            count = count_text(column.nonfinite, "value")
            lines.append(f"warning: column {name}: {count} NaN or infinite")
    facts = source.attributes.get("left_out")
    left_out = list(facts.items()) if isinstance(facts, dict) else []
    lines += [f"left out: {name}: {why}" for name, why in left_out[:MOST_LEFT_OUT]]
    if len(left_out) > MOST_LEFT_OUT:
        lines.append("left out: others too, see inspect")
    lines += [f"warning: {warning}" for warning in source.warnings]
    return list(map(printable, lines))  # names and texts are those of strangers


def _video_text(videos: Mapping[str, Any], steps: int) -> str:
    """Tell which frames stay in videos, where, and what that saves."""
    files = {file["path"]: file["bytes"] for column in videos.values() for file in column["files"]}
    folder = os.path.commonpath([os.path.dirname(path) for path in files]) or "."
    sizes = (np.dtype(kept["dtype"]).itemsize * prod(kept["shape"]) for kept in videos.values())
    here, decoded = size_text(sum(files.values())), size_text(steps * sum(sizes))
    text = f"{', '.join(videos)}: {count_text(len(files), 'file')} below {folder}"
    return f"{text}, {here}; decoded {decoded}"


def _facts(document: Mapping[str, Any], full: bool) -> dict[str, str]:
    source, environment = document["source"], document["environment"]
    counts = ", ".join(count_text(document[f"{noun}s"], noun) for noun in ("episode", "step"))
    shards = count_text(len(document["shards"]), "shard")
    blocks = count_text(document["digests"]["blocks"], "block")
    checked = f"manifest, headers and episodes match; {blocks} unread"
    scores, score_text = environment["reference_scores"], "no reference scores"
    if scores is not None:
        score_text = f"reference scores {scores['minimum']:g} to {scores['maximum']:g}"
        score_text += f" ({scores['name']}{', indicative only' if scores['indicative'] else ''})"
    made_with = "".join(f" {key}={value}" for key, value in environment.get("options", {}).items())
    rows = {
        "dataset": document["path"],
        "size": f"{counts}, {size_text(document['bytes'])} in {shards}",
        "digests": f"{blocks} checked, all match" if document["verified"] else checked,
        "environment": f"{environment['id'] or 'unknown'}{made_with}; {score_text}",
        "source": f"{source['uri']} ({source['format']}; rule: {source['rule']})",
    }
    if videos := document.get("videos"):
        rows["videos"] = _video_text(videos, document["steps"])
    if HISTORIES in source["attributes"]:
        rows["histories"] = f"by {source['attributes'][HISTORIES]}"
    if full:
        rows |= {"scores": scores["note"]} if scores is not None and scores["note"] else {}
        rows["format"] = f"version {document['format_version']}"
        rows["source digest"] = f"xxh3-128:{source['digest']}" if source["digest"] else "none"
        for key, value in source["attributes"].items():
            if value not in (None, [], {}, ""):
                text = value if isinstance(value, str) else json.dumps(value)
                rows[f"  {key}"] = text[:LONGEST_TEXT] + " …" * (len(text) > LONGEST_TEXT)
    return rows


def _print_facts(console: Terminal, facts: Mapping[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", overflow="fold", max_width=30)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _print_columns(console: Terminal, document: Mapping[str, Any], full: bool) -> None:
    columns, statistics = document["columns"], document["statistics"]
    main, more = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for column in columns if full else columns[:MOST_COLUMNS]:
        name, facts = column["name"], statistics[column["name"]]
        shape = " x ".join(map(str, column["shape"])) or "scalar"
        low, mean, high, std = (_spread(key, facts[key]) for key in ("min", "mean", "max", "std"))
        main.append((name, column["dtype"], shape, low, mean, high))
        more.append((name, size_text(column["bytes"]), std, f"{facts['nonfinite']:,}"))
    print_table(console, ("column", "dtype", "shape", "min", "mean", "max"), main)
    if hidden := len(columns) - len(main):
        console.print(f"and {count_text(hidden, 'column')} more", style="dim")
    if full or any(statistics[column["name"]]["nonfinite"] for column in columns):
        console.print()
        print_table(console, ("column", "bytes", "std", "NaN or Inf"), more)


def _spread(key: str, statistic: Any) -> str:
    """Return a statistic of a column; of a wide one, lowest to highest of its elements."""
    values = np.asarray(statistic, np.float64)  # JSON null becomes NaN
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "-"
    low, high = number_text(float(finite.min())), number_text(float(finite.max()))
    if low == high or key in ("min", "max"):
        return high if key == "max" else low
    return f"{low} to {high}"


def _endings(document: Mapping[str, Any]) -> dict[str, str]:
    names = {"terminated": "terminated", "truncated": "truncated", "neither": "unmarked"}
    ends = [(name, document["endings"][key]) for key, name in names.items()]
    shares = [f"{name} {n:,} ({100 * n / document['episodes']:.1f} %)" for name, n in ends if n]
    rows = {"endings": ", ".join(shares)}
    if all(column["name"] != "rewards" for column in document["columns"]):
        rows["returns"] = "none: there are no rewards"
    for noun in ("return", "length") if "returns" not in rows else ("length",):
        spread = document[f"{noun}s"]
        facts = [f"{name} {number_text(spread[name])}" for name in ("mean", "std", "min", "max")]
        counts = spread["histogram"]["counts"]
        most = max(counts, default=0) or 1
        bars = "".join(_HEIGHTS[-(-count * (len(_HEIGHTS) - 1) // most)] for count in counts)
        rows[f"{noun}s"] = f"{', '.join(facts)}  {bars}"
        if left_out := spread.get("left_out", 0):
            count = count_text(left_out, "episode")
            rows[""] = f"left out: {count} with a {noun} that is NaN or infinite"
    return rows
