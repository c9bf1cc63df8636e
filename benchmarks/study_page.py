"""Put measured results into the pages that tell of them, raw numbers and HTML beside them.

    python -m benchmarks.study_page hopper=runs/hopper/strategies.json walker2d=...
    python -m benchmarks.study_page --quality quality.json

The first is for docs/studies/sampling-on-replay-data.md, from ``gear-offline strategies --train``;
the second for docs/quality.md, from benchmarks/quality.py.  Replaced is what stands between the
marks ``<!-- results -->`` and ``<!-- end of results -->``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.analysis.learning import compare_rows, limits_of
from gear_offline.analysis.learning_text import (
    columns_of,
    failed_runs,
    interval,
    learning_rows,
    number,
    probability,
    signed,
    threshold_line,
    training_line,
    verdict_text,
)
from gear_offline.analysis.page import render
from gear_offline.analysis.significance import holm, permutation_test
from gear_offline.analysis.text import short
from gear_offline.core.files import write_file

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "studies" / "sampling-on-replay-data.md"
QUALITY = DOCS / "quality.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
LEFT_OUT = ("score", "p, signs", "seconds to it", "seconds trained")  # in the JSON


def refreshed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with every figure computed again from the runs' raw numbers."""
    training = dict(document["training"])
    rows = [{"label": row["label"], "runs": row["runs"]} for row in training["strategies"]]
    goal = training["threshold"]
    value = compare_rows(rows, training["marks"], goal["value"] if goal["share"] is None else None)
    training["threshold"] = {**goal, "value": value}
    training["limits"] = limits_of(rows)
    return {**document, "training": {**training, "strategies": rows}}


def section(name: str, document: Mapping[str, Any]) -> str:
    """Return the Markdown of one dataset's results."""
    training, data = document["training"], document["data"]
    lines = [
        f"### {name}",
        "",
        f"{data['episodes']:,} episodes, {data['steps']:,} steps, mean return of a step's episode "
        f"{short(data['mean_return'])}, best return {short(data['best_return'])}. "
        f"{training_line(training)} {threshold_line(training) or ''}",
        "",
        *_final_table(training),
        "",
        *_target_table(training),
        "",
        *_draw_table(document),
    ]
    lines += [f"\nFailed: {line}" for line in failed_runs(training)]
    return "\n".join(lines) + "\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _final_table(training: Mapping[str, Any]) -> list[str]:
    columns = [c for c in columns_of(training) if c.title not in LEFT_OUT]
    rows = [
        [row["label"], *(column.text(row) for column in columns)] for row in learning_rows(training)
    ]
    return _markdown(["strategy", *(column.title for column in columns)], rows)


def _target_table(training: Mapping[str, Any]) -> list[str]:
    """Return for each asked return, and along the way, what was achieved."""
    targets, marks = training["targets"], training["marks"]
    head = ["strategy"]
    head += [f"asked for {number(target)}: mean (95 %), against baseline" for target in targets]
    head += [f"return at step {mark:,}" for mark in marks]
    rows = []
    for row in learning_rows(training):
        if not row["final"] or "targets" not in row["final"]:
            continue
        cells = [
            f"{number(t['mean'])} ({interval(t)}), {verdict_text(row, f'target_{place}')}"
            for place, t in enumerate(row["final"]["targets"])
        ]
        means = {point["step"]: point["score"]["mean"] for point in row["curve"]}
        cells += [number(means[mark]) if mark in means else "-" for mark in marks]
        rows.append([row["label"], *cells])
    return _markdown(head, rows)


def _draw_table(document: Mapping[str, Any]) -> list[str]:
    """Return what the strategies drew, and how the loss on probes differs from the baseline's."""
    trained = {row["label"]: row for row in document["training"]["strategies"]}
    rows = []
    for row in document["strategies"]:
        if "error" in row or row["label"] not in trained:
            continue
        versus = trained[row["label"]]["versus"]
        verdicts = ["-", "-"]
        if versus is not None:
            verdicts = [
                f"{_share(versus[name]['mean'], trained, name)}, {versus[name]['verdict']}"
                for name in ("probe_all", "probe_best")
            ]
        rows.append(
            [
                row["label"],
                f"{100 * row['coverage_steps']:.1f} %",
                short(row["effective_segments"]),
                short(row["mean_return"]),
                *verdicts,
            ]
        )
    head = ["strategy", "steps shown", "effective starts", "mean return drawn"]
    head += ["loss on all windows, against baseline", "on those of the best tenth"]
    return _markdown(head, rows)


def _share(difference: float, trained: Mapping[str, Any], name: str) -> str:
    base = next(iter(trained.values()))["final"][name]["mean"]
    return f"{signed(100 * difference / base)} %"


def together(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table over all datasets: pairs of seeds of each, in units of its baseline's mean."""
    trained = [document["training"]["strategies"] for document in documents.values()]
    labels = [row["label"] for row in trained[0][1:] if _everywhere(row["label"], trained)]
    found = []
    for label in labels:
        shares: list[float] = []
        for rows in trained:
            base = rows[0]["final"]["score"]["mean"]
            ends = [_ends(row) for row in rows if row["label"] in (rows[0]["label"], label)]
            pairs = zip(ends[1], ends[0], strict=True)
            shares += [(new - old) / abs(base) for new, old in pairs]
        found.append((label, shares, permutation_test(shares)))
    cells = []
    for (label, shares, p), adjusted in zip(found, holm([p for *_, p in found]), strict=True):
        above = sum(share > 0 for share in shares)
        mean = f"{signed(100 * sum(shares) / len(shares))} %"
        cells.append(
            [label, mean, f"{above} of {len(shares)}", probability(p), probability(adjusted)]
        )
    head = ["strategy", "mean difference", "pairs above the baseline", "p, signs", "after Holm"]
    lines = [
        "### Both together" if len(documents) == 2 else "### All together",
        "",
        "Differences of pairs of runs, as shares of the baseline's mean return on their dataset, "
        "and the exact sign-flip test over all of them.",
        "",
        *_markdown(head, cells),
    ]
    return "\n".join(lines) + "\n"


def _everywhere(label: str, trained: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether a strategy, and the baseline, played to the end with every seed on every dataset."""
    for rows in trained:
        row = next((row for row in rows if row["label"] == label), None)
        for one in (row, rows[0]):
            if one is None or one["complete"] < len(one["runs"]) or "score" not in one["final"]:
                return False
    return True


def _ends(row: Mapping[str, Any]) -> list[float]:
    return [run["points"][-1]["score"] for run in row["runs"]]


def quality_section(document: Mapping[str, Any]) -> str:
    """Return the Markdown of what benchmarks/quality.py measured."""
    from benchmarks.parity import OURS, RELEASED
    from benchmarks.quality import table

    alone, steps = document["steps_per_second_alone"], document["settings"]["steps"]
    place = document["device"] if document["device"] != "cpu" else document["machine"]["cpu"]
    versions = document["machine"]["versions"]
    seconds = {kind: steps / alone[kind] for kind in (OURS, RELEASED)}
    return (
        f"{place}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{document['machine']['date']}: {steps:,} steps, {document['episodes']} episodes for each "
        "asked return; of each run the better of the two returns, mean (standard deviation) over "
        "seeds; the score is D4RL's scale, indicative only.\n\n"
        f"{table(dict(document))}\n"
        f"A run alone on the machine does {alone[OURS]:,.0f} steps/s with ours and "
        f"{alone[RELEASED]:,.0f} with the released class and the usual sampling, so its steps take "
        f"{seconds[OURS]:.1f} and {seconds[RELEASED]:.1f} s. Here ours shared the GPU as streams, "
        f"the others as {document['jobs']} processes.\n"
    )


def fill(page: Path, results: str) -> None:
    """Replace what stands between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    write_file(page, f"{before}{BEGIN}\n\n{results}\n{END}{after}".encode())


def main(words: Sequence[str] | None = None, *, page: Path = PAGE, quality: Path = QUALITY) -> None:
    """Write the pages' results and the raw numbers."""
    parser = argparse.ArgumentParser(description="fill pages with results")
    parser.add_argument("results", nargs="*", help="NAME=strategies.json")
    parser.add_argument("--quality", type=Path, help="JSON of benchmarks/quality.py")
    options = parser.parse_args(words)
    pairs = [word.partition("=") for word in options.results]
    documents = {name: refreshed(json.loads(Path(p).read_text())) for name, _, p in pairs}
    if documents:
        sections = [section(name, found) for name, found in documents.items()]
        if len(documents) > 1:
            sections.append(together(documents))
        for name, found in documents.items():
            html = page.with_name(f"{page.stem}-{name}.html")
            write_file(html, render(found).encode())
        fill(page, "\n".join(sections))
        raw = json.dumps(documents, allow_nan=False, separators=(",", ":")) + "\n"
        write_file(page.with_suffix(".json"), raw.encode())
    if options.quality is not None:
        content = options.quality.read_bytes()
        fill(quality, quality_section(json.loads(content)))
        write_file(quality.parent / "benchmarks" / "quality.json", content)


if __name__ == "__main__":
    main()
