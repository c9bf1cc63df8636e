"""README's figures, made anew from nothing, each beside its peer of the same run.

python -m benchmarks figures              all that this machine can make, as README's table
python -m benchmarks figures gather       one of them
python -m benchmarks figures --check      and how far it moved from the stored one

The stored ones are the documents in docs/benchmarks; README's table is written from them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gear_offline.core.system import usable_cores
from gear_offline.core.text import say

DOCUMENTS = Path(__file__).parents[1] / "docs" / "benchmarks"
MOVED = 0.15  # a ratio that differs by more has moved

Document = Mapping[str, Any]
Rates = Callable[[Document], tuple[float, dict[str, float]]]


@dataclass(frozen=True)
class Figure:
    """A row of README: what a benchmark's document says of us and of its peers."""

    title: str
    benchmark: str
    stored: str  # document in docs/benchmarks
    rates: Rates  # ours, and those of peers
    text: str  # of ours, {:,.0f}
    peers: Mapping[str, str]  # their names: {:.1f} x NumPy
    quick: bool = False  # its quick form has all that is needed
    gpu: bool = True  # it is of one, else of the CPU
    most: float = MOVED  # that a ratio may differ by

    def cells(self, document: Document) -> str:
        """Return the row of a Markdown table."""
        ours, _ = self.rates(document)
        texts = [self.peers[name].format(ratio) for name, ratio in self.ratios(document).items()]
        return f"| {self.title} | {self.text.format(ours)} | {', '.join(texts)} |"

    def ratios(self, document: Document) -> dict[str, float]:
        """Return ours divided by each peer's."""
        ours, peers = self.rates(document)
        return {name: ours / rate for name, rate in peers.items()}

    def missing(self, document: Document) -> list[str]:
        """Return the peers that did not run."""
        return [name for name in self.peers if name not in self.ratios(document)]

    def measure(self) -> dict[str, Any] | None:
        """Run the benchmark as whoever types it would; None if this machine cannot."""
        command = [sys.executable, "-m", "benchmarks", self.benchmark, "--json"]
        done = subprocess.run([*command, *["--quick"] * self.quick], stdout=subprocess.PIPE)
        if done.returncode:
            say(f"{self.benchmark}: not measured, see above")
            return None
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def moved(self, document: Document) -> dict[str, float]:
        """Return how far the ratio to each peer lies from the stored one."""
        stored = self.ratios(self.read())
        now = self.ratios(document)
        return {name: now[name] / before - 1 for name, before in stored.items() if name in now}

    def read(self) -> Document:
        """Return the stored document."""
        document: Document = json.loads((DOCUMENTS / self.stored).read_text(encoding="utf-8"))
        return document


def _rates(column: str, ours: Mapping[str, Any], **peers: Mapping[str, Any]) -> Rates:
    """Return the rates in rows that have these values; a peer that is not there has none."""

    def rates(document: Document) -> tuple[float, dict[str, float]]:
        found = {
            name: float(row[column])
            for name, values in (peers | {"ours": ours}).items()
            for row in reversed(document["results"])  # the first one counts
            if values.items() <= row.items()
        }
        return found.pop("ours"), found

    return rates


def _gathered(document: Document) -> tuple[float, dict[str, float]]:
    rows = {row.get("window_bytes"): row for row in document["results"] if row["what"] == "hbm"}
    small, large = rows[4096], rows[1 << 20]
    ours, name = float(small["gigabytes_per_second"]), "peer_gigabytes_per_second"
    return ours, {"small": small[name], "large": ours * large[name] / large["gigabytes_per_second"]}


def _stacked(document: Document) -> tuple[float, dict[str, float]]:
    """Compare each precision with its own; JAX-CORL's float32 products are TF32's."""
    rows = document["results"]
    rates = {(row["name"], row["precision"]): float(row["steps_per_second"]) for row in rows}
    ours = "ours, 8 seeds stacked, in sum"
    narrow = rates["the same with bfloat16 weights, 8 seeds vmapped, in sum", "bf16"]
    full = rates["the same, 8 seeds vmapped, in sum", "fp32"] / rates[ours, "fp32"]
    return rates[ours, "bf16"], {"narrow": narrow, "full": rates[ours, "bf16"] * full}


FIGURES = [
    Figure(
        "batches a second, two CPU cores, B = 64, K = 20",
        *("loader", "loader.json"),
        _rates(
            "batches_per_second",
            {"name": "GearLoader", "batch_size": 64},
            numpy={"name": "NumPy gather", "batch_size": 64},
            d3rlpy={"name": "d3rlpy", "batch_size": 64},
        ),
        *("{:,.0f}", {"numpy": "{:.1f} x NumPy on one core", "d3rlpy": "{:.0f} x d3rlpy"}),
        gpu=False,
    ),
    Figure(
        "batches a second, one H200, B = 1,024, K = 20",
        *("loader", "loader-h200.json"),
        _rates(
            "batches_per_second",
            {"name": "GearLoader, GPU, rows in hbm", "batch_size": 1024},
            numpy={"name": "NumPy gather", "batch_size": 1024},
        ),
        *("{:,.0f}", {"numpy": "{:.0f} x NumPy on one core of its CPU"}),
        most=0.3,  # NumPy made 804 and 1,181 batches/s on two machines within a day
    ),
    Figure(
        "gathering 4 KiB windows from an H200's memory",
        *("gather", "gather.json", _gathered),
        *("{:,.0f} GB/s", {"small": "{:.2f} x `torch.index_select`", "large": "1 MiB {:.2f}"}),
    ),
    Figure(
        "training steps a second, eight seeds, one H200, bfloat16",
        *("jax_corl", "jax_corl.json", _stacked),
        *("{:,.0f}", {"narrow": "{:.1f} x JAX-CORL under `vmap`", "full": "in float32 {:.2f}"}),
    ),
]


def run_figures(names: Sequence[str], *, check: bool) -> int:
    """Measure figures and print README's table; return 1 if one is missing or has moved."""
    chosen = [figure for figure in FIGURES if not names or figure.benchmark in names]
    lines, status = list[str](), 0
    if (load := os.getloadavg()[0]) > usable_cores() / 4:
        say(f"other programs take cores (load {load:.1f} of {usable_cores()}): ratios move too")
    for figure in chosen:
        if figure.gpu != torch.cuda.is_available():
            machine = "with" if figure.gpu else "without"
            say(f"left out, of a machine {machine} a GPU: {figure.title}")
            continue
        document = figure.measure()
        if document is None:
            status = 1
            continue
        for name in figure.missing(document):
            say(f"{figure.benchmark}: {name} is missing: pip install 'gear-offline[bench]'")
            status = 1
        line = figure.cells(document)
        if check:
            shares = figure.moved(document).values()
            line += f" {', '.join(f'{share:+.0%}' for share in shares)} |"
            status = max(status, *(abs(share) > figure.most for share in shares))
        lines.append(line)
    print("\n".join(lines))
    return status


def readme_rows() -> list[str]:
    """Return README's rows, from the stored documents."""
    return [figure.cells(figure.read()) for figure in FIGURES]
