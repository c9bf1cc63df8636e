"""The tables of figures in the pages are those of the JSON files that the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.study_page import BEGIN, END, PAGE, QUALITY, quality_section, section, together
from tests.docs_figures import disagreements, measured, row, table_rows

GIB = 2**30
PEERS = ("released, our loader", "the usual way")  # not predicted


def loader_table() -> Iterator[list[float | None]]:
    names = ["GearLoader, records", "GearLoader, columns", "NumPy gather"]
    for name in [*names, "NumPy gather + selection", "TorchRL", "d3rlpy", "original procedure"]:
        pairs = [row("loader", name=name, batch_size=size) for size in (64, 1024)]
        yield [r[key] for r in pairs for key in ("batches_per_second", "ratio")]


def convert_table() -> Iterator[list[float | None]]:
    for place in ("convert", "convert-memory"):
        for kind in ("contiguous", "gzip"):
            found = row(place, input=kind, workers=1)
            rates = found["megabytes_per_second"]
            values = [rates[key] for key in ("raw", "raw_fsync", "convert")]
            yield [*values, found["ratio"], found["ratio_fsync"]]


def windows_table() -> Iterator[list[float | None]]:
    rate, count = "gigabytes_per_second", "million_segments_per_second"
    for size in (256, 880, 1280, 2048, 4096, 65536, 1 << 20):
        host, hbm = (row("gather", tier=tier, segment_bytes=size) for tier in ("host", "hbm"))
        yield [host[rate], hbm[rate], hbm[f"all_{rate}"], host[count], hbm[count]]
    yield [measured("gather")["bus_gigabytes_per_second"]]


def layouts_table() -> Iterator[list[float | None]]:
    found = measured("gather")["layouts"]
    for records, columns in zip(found[::2], found[1::2], strict=True):
        rates = [r["gigabytes_per_second"] for r in (records, columns)]
        yield [records["segment_bytes"], *rates]


def priorities_table() -> Iterator[list[float | None]]:
    for found in measured("select")["gpu"]["results"]:
        seconds = found["seconds"]
        keys = ("draw", "cumsum: draw", "update", "cumsum: update")
        made = found["build_seconds"] + found["fill_seconds"]
        yield [*(seconds[key] * 1e3 for key in keys), found["bytes_per_item"], made]


def choosing_table() -> Iterator[list[float | None]]:
    keys = ["weighted", "torch.multinomial", "numpy choice", "priorities: draw", "TorchRL: draw"]
    keys += ["priorities: update", "TorchRL: update", "shuffled"]
    for found in measured("select-cpu")["results"]:
        yield [found["seconds"][key] * 1e3 for key in keys if key in found["seconds"]]


def batches_table() -> Iterator[list[float | None]]:
    laws = {b["law"]: b for b in measured("select")["gpu"]["batches"]}
    left = ["uniform_steps", "uniform_episodes", "return_weighted", "top_percent"]
    right = ["lifo", "shuffled_epochs", "min_dt", "d3rlpy", "prioritized", "mixture"]
    for pair in zip([*left, "stratified_return", "fifo"], right, strict=True):
        yield [laws[n][f"microseconds, B={size}"] for n in pair for size in ("64", "1,024")]


def train_table() -> Iterator[list[float | None]]:
    for found in measured("train")["results"]:
        yield [found[key] for key in ("steps_per_second", "milliseconds", "ratio")]


def parity_table() -> Iterator[list[float | None]]:
    for found in measured("parity")["verdict"].values():
        sides = [
            found[side][key] for side in ("gear_offline", "released") for key in ("mean", "sd")
        ]
        yield [*sides, *found["interval"]]


def requests_table() -> Iterator[list[float | None]]:
    found = measured("exchange")["requests"]
    for start in range(3):
        same = found[start::3]
        yield [r[key] for r in same for key in ("nanoseconds", "best_nanoseconds")]


def step_table() -> Iterator[list[float | None]]:
    names = ["dt_87m", "dt_87m, float32 weights", "dt_87m, batch 2,048", "dt_1b"]
    names += [f"dt_1b, {what}" for what in ("float32 weights", "batch 1,024", "100 steps a window")]
    for name in [*names, "dt_1b, recomputed", "dt_1b, 4 micro-batches"]:
        found = row("step", name=name)
        keys = ("milliseconds", "segments_per_second", "tflops")
        shares = [found["mfu"] * 100, found["memory_bytes"] / GIB, found["stall"] * 100]
        yield [*(found[key] for key in keys), *shares]


def sizes_table() -> Iterator[list[float | None]]:
    for name in ("dt_1m", "dt_15m", "dt_200m", "dt_87m, launched one by one"):
        found = row("step-sizes", name=name)
        keys = ("milliseconds", "segments_per_second", "tflops")
        shares = [found["mfu"] * 100, found["memory_bytes"] / GIB, found["stall"] * 100]
        yield [*(found[key] for key in keys), *shares]


def several_table() -> Iterator[list[float | None]]:
    for name, gpus in (("dt_87m", (1, 2, 4)), ("dt_1b", (1, 4)), ("dt_1b, FSDP", (4,))):
        for count in gpus:
            whole = name if count == 1 or "," in name else f"{name}, DDP"
            found = row("step-several", name=whole, gpus=count)
            alone = row("step-several", name=name.split(",")[0], gpus=1)["segments_per_second"]
            keys = ("milliseconds", "segments_per_second", "tflops")
            linear = [found["segments_per_second"] / alone / count * 100] if count > 1 else []
            yield [count, *(found[k] for k in keys), found["memory_bytes"] / GIB, *linear]


def four_table() -> Iterator[list[float | None]]:
    names = ["dt_1b", "dt_1b, DDP", "dt_1b, FSDP, collected once", "dt_1b, FSDP, collected twice"]
    for name in [*names, "dt_87m", "dt_87m, launched one by one", "dt_87m, DDP"]:
        found = row("step-four", name=name)
        alone = row("step-four", name=name.split(",")[0], gpus=1)["segments_per_second"]
        keys, gpus = ("milliseconds", "segments_per_second", "tflops"), found["gpus"]
        linear = [found["segments_per_second"] / alone / gpus * 100] if gpus > 1 else []
        yield [gpus, *(found[k] for k in keys), found["memory_bytes"] / GIB, *linear]


SHARDS = ("dt_1b, FSDP, collected once",)


def graphs_table(file: str, gpus: int, others: tuple[str, ...]) -> Iterator[list[float | None]]:
    for name in ("dt_87m", "dt_1b"):
        alone = [row(file, name=name, gpus=1, gpu_number=number) for number in range(gpus)]
        together = [f"{name}, one graph", *(other for other in others if other.startswith(name))]
        whole = sum(found["segments_per_second"] for found in alone)
        for found in (*alone, *(row(file, name=each, gpus=gpus) for each in together)):
            keys = ("milliseconds", "segments_per_second", "tflops")
            is_all = found["gpus"] == gpus
            share = [found["segments_per_second"] / whole * 100] if is_all else []
            number = [] if is_all else [found["gpu_number"]]
            yield [*number, *(found[k] for k in keys), found["memory_bytes"] / GIB, *share]


def two_table() -> Iterator[list[float | None]]:
    return graphs_table("step-two", 2, SHARDS)


def four_graphs_table() -> Iterator[list[float | None]]:
    return graphs_table("step-graphs-four", 4, SHARDS)


def load_table() -> Iterator[list[float | None]]:
    for found in measured("load")["results"]:
        speed = found["gigabytes_per_second"]
        names = ("raw", "raw, written", "load", "load, no digests")
        ratios = (found[f"ratio{which}"] for which in ("", "_locked", "_written", "_processor"))
        yield [*(speed[name] for name in names), *ratios]


def stacks_table() -> Iterator[list[float | None]]:
    yield from side_by_side("fifth", [f"stacked {count}" for count in (2, 4, 8, 16, 32)])


def streams_table() -> Iterator[list[float | None]]:
    yield from side_by_side("fourth", [f"streams {count}" for count in (2, 4, 8)])


def side_by_side(part: str, names: list[str]) -> Iterator[list[float | None]]:
    rows = measured("sweep")[part]["rows"]
    for name in ("1", *names):
        rate = rows[name]["steps_per_second"]
        yield [int(name.split()[-1]), rate, rate / rows["1"]["steps_per_second"]]


def traffic_table() -> Iterator[list[float | None]]:
    names = ("nodes", "ranks_per_node", "segments_per_rank", "skew", "replicated")
    rows = [(8, 1, 1024, 0), (8, 8, 16, 0), (8, 8, 256, 0), (8, 8, 4096, 0), (64, 8, 128, 0)]
    kinds = [(*r, 0, "bytes") for r in rows] + [(8, 8, 256, 1, 0, "bytes")]
    for *numbers, kind in [
        *kinds,
        (8, 8, 256, 1, 0, "probability"),
        (8, 8, 256, 0.5, 0.05, "probability"),
    ]:
        found = row("traffic", equal_shares_of=kind, **dict(zip(names, numbers, strict=True)))
        shares = [found[key] * 100 for key in ("replicated", "crossing", "usual_crossing")]
        yield [found["segments_per_rank"], found["skew"], *shares]


def recovery_table() -> Iterator[list[float | None]]:
    keys = ["detection", "restart", "start_up", "first_step", "replay", "until_first_step"]
    for found in measured("recovery")["results"]:
        yield [found[key] for key in [*keys, "until_caught_up"]]


def save_table() -> Iterator[list[float | None]]:
    for size in ("1 M", "87 M"):
        ways = [row("save", size=size, way=way) for way in ("async", "sync", "torch.save")]
        ways.append(row("save", size=size, way="dcp.async_save"))
        yield [ways[0]["bytes"] / 2**20, *(way["lost_seconds"] for way in ways)]


def quality_table() -> Iterator[list[float | None]]:
    for found in measured("quality")["datasets"].values():
        summary = found["summary"]
        sides = [
            summary[what][side][key]
            for what in ("return", "score")
            for side in ("gear_offline", "released")
            for key in ("mean", "sd")
        ]
        losses = [summary["probe loss"][side]["mean"] for side in ("gear_offline", "released")]
        means = [found["mean_return"], found["best_return"]]
        yield [*means, *sides, *summary["return"]["interval"], *losses]


TABLES: Mapping[str, tuple[str, str, Callable[[], Iterator[list[float | None]]]]] = {
    "loader": ("docs/benchmarks/README.md", "B = 64, batches/s", loader_table),
    "convert": ("docs/benchmarks/README.md", "raw, then fsync", convert_table),
    "gather": ("docs/benchmarks/README.md", "host memory, GB/s", windows_table),
    "layouts": ("docs/benchmarks/README.md", "records", layouts_table),
    "select": ("docs/benchmarks/README.md", "draw 10^6", priorities_table),
    "select-cpu": ("docs/benchmarks/README.md", "`torch.multinomial`", choosing_table),
    "batches": ("docs/benchmarks/README.md", "strategy", batches_table),
    "train": ("docs/benchmarks/README.md", "x the usual way", train_table),
    "parity": ("docs/benchmarks/README.md", "95 % interval of the difference", parity_table),
    "exchange": ("docs/benchmarks/README.md", "4,096 reads", requests_table),
    "step": ("docs/large-models.md", "against a fixed batch", step_table),
    "step-sizes": ("docs/large-models.md", "stall", sizes_table),
    "step-several": ("docs/large-models.md", "of linear", several_table),
    "sweep": ("docs/sweeps.md", "steps/s in sum", stacks_table),
    "streams": ("docs/sweeps.md", "streams, steps/s in sum", streams_table),
    "step-four": ("docs/large-models.md", "share of linear", four_table),
    "step-two": ("docs/large-models.md", "share of both alone", two_table),
    "step-graphs-four": ("docs/large-models.md", "share of the four alone", four_graphs_table),
    "load": ("docs/benchmarks/README.md", "locked too", load_table),
    "traffic": ("docs/clusters.md", "crosses nodes", traffic_table),
    "recovery": ("docs/clusters.md", "detection", recovery_table),
    "save": ("docs/training.md", "`dcp.async_save`", save_table),
    "quality": ("docs/quality.md", "mean and best return in it", quality_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_show_what_was_measured(name: str) -> None:
    page, column, expected = TABLES[name]
    assert disagreements(table_rows(page, column), list(expected())) == []


@pytest.mark.parametrize("name", TABLES)
def test_wrong_tables_are_found(name: str) -> None:
    page, column, expected = TABLES[name]
    rows, values = table_rows(page, column), list(expected())
    other = [[None if v is None else v * 1.5 + 1 for v in row] for row in values]
    assert len(disagreements(rows, other)) >= len(rows)
    assert disagreements(rows[1:], values) and disagreements(rows, values[1:])


def test_predictions_are_beside_what_was_measured() -> None:
    """`tests/test_planning.py` predicts anew; here the page's table agrees with the files."""
    names = ("step", "step-several", "paper-run", "train")
    found = [r for name in names for r in measured(name)["results"]]
    ranks = [r for name in ("step-two", "step-graphs-four") for r in measured(name)["results"]]
    found += [r for r in ranks if r["gpus"] > 1]
    expected = [r for r in found if r["name"] not in ("one graph, compiled, bf16", *PEERS)]
    rows = table_rows("docs/planning.md", "GB a GPU")
    assert sorted(float(cells[2]) for cells in rows) == sorted(
        round(r["milliseconds"], 2) for r in expected
    )
    memory = [r["memory_bytes"] / 1e9 for r in expected if "memory_bytes" in r]
    shown = [cells for cells in rows if cells[5]]
    assert sorted(float(cells[5]) for cells in shown) == sorted(round(m, 1) for m in memory)
    for cells in rows:
        pairs = [cells[2:5], *([cells[5:8]] if cells[5] else [])]
        for value, predicted, ratio in pairs:
            bound = 0.006 + 0.06 / float(value) if "." in value else 0.02
            assert float(predicted) / float(value) == pytest.approx(float(ratio), abs=bound)


def results(page: Path) -> str:
    """Return what stands between the marks of a page, where measured results are filled in."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def test_the_studys_results_are_made_of_its_json() -> None:
    documents = json.loads(PAGE.with_suffix(".json").read_text())
    parts = [section(name, found) for name, found in documents.items()]
    assert results(PAGE) == "\n".join([*parts, together(documents)]).strip()


def test_the_quality_pages_results_are_made_of_its_json() -> None:
    assert results(QUALITY) == quality_section(measured("quality")).strip()
