"""The figures of the README are those of the JSON files that the benchmarks wrote."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs_figures import FOLDER, NUMBER, agrees, measured, row, table_rows

MEGA = 1e6

Figures = dict[str, list[tuple[str, float]]]
NOT_MEASURED_HERE = {  # rows whose figures no JSON file holds
    "`make demo`": "the demo writes them to demo/; benchmarks/README.md says where it ran",
}


def readme_figures() -> Figures:
    """Return, for the beginning of each row of the README's table, its figures and their values."""
    loader = {(r["name"], r["batch_size"]): r for r in measured("loader")["results"]}

    def times(peer: str, size: int) -> float:
        ours: float = loader["GearLoader, records", size]["batches_per_second"]
        return ours / float(loader[peer, size]["batches_per_second"])

    def against_peers(size: int) -> list[tuple[str, float]]:
        texts = {64: ("2.6", "20", "68"), 1024: ("2.2", "6", "97")}[size]
        values = [times(peer, size) for peer in ("NumPy gather", "TorchRL", "d3rlpy")]
        return list(zip(texts, values, strict=True))

    convert = row("convert", input="contiguous", workers=1)
    memory = measured("convert")["memory"]["contiguous"]
    learnt = measured("parity")["verdict"]["probe loss at step 10000"]
    graph, usual = (
        row("train-combined", name="one graph, compiled, bf16"),
        row("train-combined", name="the usual way"),
    )
    run = measured("paper-run")
    stacked, streams = (measured("sweep")[part]["rows"] for part in ("fifth", "fourth"))
    eight, alone = (stacked[name]["steps_per_second"] for name in ("stacked 8", "1"))
    side = streams["streams 8"]["steps_per_second"]
    one, ones = row("step", name="dt_1b"), row("step-several", name="dt_1b")
    rate = "segments_per_second"
    graphs = "step-graphs-four"
    four, shards, small = (
        row(graphs, name=name, gpus=4)[rate]
        for name in ("dt_1b, one graph", "dt_1b, FSDP, collected once", "dt_87m, one graph")
    )
    large_alone, small_alone = (
        sum(r[rate] for r in measured(graphs)["results"] if r["name"] == name)
        for name in ("dt_1b", "dt_87m")
    )
    frames = row("images", tier="host", stored="single frames")
    training = {r["name"]: r for r in measured("images")["training"]}
    crossing = row("traffic", nodes=8, ranks_per_node=1)
    batches = measured("gather")["small_batch"]
    ours, theirs = batches["hbm: GearLoader, batches/s"], batches["CPU gather and copy, batches/s"]
    few = measured("select")["gpu"]["results"][0]["seconds"]
    billion = measured("select")["gpu"]["results"][-1]
    draw, update = (billion["seconds"][key] for key in ("draw", "update"))
    peer = [billion["seconds"][f"cumsum: {key}"] for key in ("draw", "update")]
    near = row("gather", tier="hbm", segment_bytes=4096)
    far = row("gather", tier="host", segment_bytes=4096)
    return {
        "batches a second on 2 CPU cores": [
            ("27,508", loader["GearLoader, records", 64]["batches_per_second"]),
            *against_peers(64),
        ],
        "the same at B = 1,024": [
            ("2,463", loader["GearLoader, records", 1024]["batches_per_second"]),
            *against_peers(1024),
        ],
        "converting a 1 GB D4RL-layout file": [
            ("1,042", convert["megabytes_per_second"]["convert"]),
            ("1.18", convert["ratio_fsync"]),
            ("0.78", convert["ratio"]),
        ],
        "peak memory of that conversion": [
            ("122", memory["peak_bytes"] / MEGA),
            ("52", memory["imports_bytes"] / MEGA),
        ],
        "squared error after 10,000 steps": [
            ("2.21e-3", learnt["gear_offline"]["mean"]),
            ("2.20e-3", learnt["released"]["mean"]),
        ],
        "training steps a second, the paper's model": [
            ("2,112", graph["steps_per_second"]),
            ("30", graph["steps_per_second"] / usual["steps_per_second"]),
            ("69", usual["steps_per_second"]),
            ("113", row("train", name="the usual way")["steps_per_second"]),
        ],
        "100,000 steps of it": [
            ("89", run["wall_seconds"]),
            ("50", 1e5 / run["summary"]["steps_per_second"]),
            *(
                (text, o["wall_seconds"])
                for text, o in zip(("79", "95"), run["others"], strict=True)
            ),
        ],
        "eight runs of that model on one H200, stacked": [
            ("8,967", eight),
            ("4.4", eight / alone),
            ("2,040", alone),
            ("4,642", side),
            ("2.1", side / streams["1"]["steps_per_second"]),
        ],
        "1.2 B parameters, one H200": [
            ("597", one["tflops"]),
            ("605", ones["tflops"]),
            ("60", one["mfu"] * 100),
            ("61", ones["mfu"] * 100),
        ],
        "the same on 4 H200": [
            ("5,392", four),
            ("98.5", four / large_alone * 100),
            ("94.9", shards / large_alone * 100),
        ],
        "86 M parameters on 4 H200": [("58,320", small), ("95.6", small / small_alone * 100)],
        "Atari-like frames from pinned host memory": [
            ("50.5", frames["gigabytes_per_second"]),
            (
                "0.91",
                frames["gigabytes_per_second"] / measured("images")["bus_gigabytes_per_second"],
            ),
            ("0.7", training["from host memory, compiled"]["data_wait_share"] * 100),
        ],
        "share of a batch that crosses 8 nodes": [
            ("1.2", crossing["crossing"] * 100),
            ("87.5", crossing["usual_crossing"] * 100),
        ],
        "batches a second on that H200": [("146,071", ours), ("4.8", ours / theirs)],
        "a million draws from 10^9 priorities": [
            ("0.30", draw * 1e3),
            ("0.23", update * 1e3),
            ("1.7", peer[0] / draw),
            ("25", peer[1] / update),
            ("0.74", few["cumsum: draw"] / few["draw"]),
            ("0.55", few["cumsum: update"] / few["update"]),
            ("8.5", billion["bytes_per_item"]),
        ],
        "gathering 4 KiB windows there": [
            ("1,885", near["gigabytes_per_second"]),
            ("50.1", far["gigabytes_per_second"]),
            ("0.98", near["ratio"]),
            ("0.90", far["ratio"]),
        ],
    }


def readme_findings(rows: list[list[str]], figures: Figures) -> list[str]:
    """Return what is wrong with the README's table, and the rows that nothing is known about."""
    wrong = []
    for start, values in figures.items():
        found = [r for r in rows if r[0].startswith(start)]
        if len(found) != 1:
            wrong.append(f"{len(found)} rows begin with {start!r}")
            continue
        shown = NUMBER.findall(" ".join(found[0][1:]))
        wrong += [f"{start}: {text} is not shown" for text, _ in values if text not in shown]
        wrong += [f"{start}: {text} is {v:.6g}" for text, v in values if not agrees(text, v)]
    known = (*figures, *NOT_MEASURED_HERE)
    return wrong + [f"unknown row: {r[0]}" for r in rows if not r[0].startswith(known)]


def test_the_figures_of_the_readme_are_the_measured_ones() -> None:
    assert readme_findings(table_rows("README.md", "measured"), readme_figures()) == []


def test_every_benchmark_is_told_of_with_its_command_machine_and_date() -> None:
    page = (FOLDER / "README.md").read_text()
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) > 15
    assert [file.name for file in files if f"({file.name})" not in page] == []
    for file in files:
        document = json.loads(file.read_text())
        machine = document["machine"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", machine["date"]), file.name
        assert "cpu" in machine or "gpu" in machine, file.name
        assert machine["versions"], file.name


# What the comparisons must find.


@pytest.mark.parametrize("shown", ["27,508", "2.75e4", "27,507.7", "28e3"])
def test_rounded_numbers_agree(shown: str) -> None:
    assert agrees(shown, 27507.669)


@pytest.mark.parametrize("shown", ["27,507", "27,509", "2.76e4", "-27,508"])
def test_other_numbers_do_not_agree(shown: str) -> None:
    assert not agrees(shown, 27507.669)


def test_a_wrong_figure_a_missing_row_and_a_new_row_are_found() -> None:
    rows, figures = table_rows("README.md", "measured"), readme_figures()
    wrong = [[cell.replace("27,508", "27,608") for cell in cells] for cells in rows]
    assert "27,508 is not shown" in readme_findings(wrong, figures)[0]
    assert readme_findings(rows[1:], figures)
    assert readme_findings([*rows, ["new", "1", "2"]], figures) == ["unknown row: new"]
    shifted: Figures = {k: [(text, v * 1.2) for text, v in f] for k, f in figures.items()}
    assert len(readme_findings(rows, shifted)) > 30
