"""Seconds of training that a checkpoint costs: ours and peers.

The model trains on one fixed batch with AdamW; a checkpoint is the parameters and both moments, in
float32.  Steps are timed before each save; then steps go on until the checkpoint is on the disk.
What that took beyond the same number of undisturbed steps is what the save cost.  ``torch.save``
with an fsync and ``torch.distributed.checkpoint.async_save`` save the same tensors; they write
pickles and compute no digests.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import wait
from gear_offline.artifacts.checkpoint import Keep
from gear_offline.batches.tables.fields import Window
from gear_offline.config.recipe import load_recipe
from gear_offline.core.progress import Progress
from gear_offline.distributed.world import World
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.training.saving import Saver

CONTEXT, STATE_DIM, ACTION_DIM = 20, 11, 3
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {  # options, batch, turns
    "1 M": ({"hidden_size": 128, "layers": 3, "heads": 1}, 64, 5),
    "87 M": ({"hidden_size": 768, "layers": 12, "heads": 12}, 256, 3),
    "1.2 B": ({"hidden_size": 2048, "layers": 24, "heads": 16}, 256, 1),
}
WAYS = ("ours", "torch.save", "dcp.async_save")
BEFORE_SECONDS = 1.0  # of undisturbed steps before each save

Save = Callable[[Path, int], Callable[[], bool]]  # begins; what it returns says whether it is done


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure on the GPU, else on the CPU; three minutes (`quick`, or a CPU: the smallest size)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = list(SIZES)[:1] if quick or device.type == "cpu" else list(SIZES)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="gear-benchmark-") as temporary,
        _one_process(),
        Progress("save", total=len(chosen) * len(WAYS), unit="rows") as progress,
    ):
        for size in chosen:
            options, batch, turns = SIZES[size]
            turns = 1 if quick else turns
            trained = _Trained(options, batch, device)
            for way in WAYS:
                save = getattr(trained, f"save_{way.replace('.', '_')}")
                losses = [trained.lost(save, Path(temporary)) for _ in range(turns)]
                rows.append(
                    {
                        "size": size,
                        "way": way,
                        "bytes": trained.bytes,
                        "lost_seconds": statistics.median(lost for lost, _ in losses),
                        "saved_seconds": statistics.median(done for _, done in losses),
                        "step_milliseconds": trained.step_seconds * 1e3,
                    }
                )
                progress.advance()
            del trained
    return {"device": str(device), "results": rows}


class _Trained:
    """A model, its optimiser and one batch of `batch` windows."""

    def __init__(self, options: dict[str, Any], batch: int, device: torch.device) -> None:
        self.device = device
        self.recipe = load_recipe("paper")
        self.model: DecisionTransformer = build_model(
            state_dim=STATE_DIM, action_dim=ACTION_DIM, context_length=CONTEXT, **options
        )
        self.model.to(device).train()  # type: ignore[arg-type, unused-ignore]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        shape = (batch, CONTEXT)
        self._inputs = {
            "states": torch.randn(*shape, STATE_DIM, device=device),
            "actions": torch.rand(*shape, ACTION_DIM, device=device),
            "rewards": torch.zeros(*shape, 1, device=device),
            "returns_to_go": torch.rand(*shape, 1, device=device),
            "timesteps": torch.arange(CONTEXT, device=device).expand(shape),
            "attention_mask": torch.ones(shape, device=device),
        }
        self._step_number = 0
        self._savers: list[Saver] = []
        self.step_seconds = 0.0
        for _ in range(10):
            self.step()
        self.bytes = sum(t.numel() * t.element_size() for t in self.tensors().values())

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            predicted = self.model(**self._inputs, padding="right").action_preds
            loss = (predicted.float() - self._inputs["actions"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._step_number += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"optimizer/{kind}/{number}": value for kind, value in state.items()}
        return tensors

    def lost(self, save: Save, folder: Path) -> tuple[float, float]:
        """Return the seconds that one save costs training, and until it is on the disk."""
        wait()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < BEFORE_SECONDS or steps < 3:
            self.step()
            wait()
            steps += 1
        self.step_seconds = (time.perf_counter() - began) / steps
        place = folder / "save"
        began, steps = time.perf_counter(), 0
        is_done = save(place, self._step_number)
        saved = None
        while saved is None or steps < 3:
            self.step()
            wait()
            steps += 1
            if saved is None and is_done():
                saved = time.perf_counter() - began
        lost = time.perf_counter() - began - steps * self.step_seconds
        for saver in self._savers:
            saver.close()
        self._savers.clear()
        shutil.rmtree(place)
        return lost, saved

    def save_ours(self, folder: Path, step: int) -> Callable[[], bool]:
        """A `Saver`."""
        moments = {n: t for n, t in self.tensors().items() if n.startswith("optimizer/")}
        learner: Any = SimpleNamespace(  # what a Saver asks
            step=step,
            world=World(),
            recipe=self.recipe,
            model=self.model,
            loader=SimpleNamespace(
                state_dict=dict, window=Window(context_length=CONTEXT, returns_scale=1.0)
            ),
            optimizer=SimpleNamespace(describe=list),
            parallel=SimpleNamespace(sharded=False),
            device=next(self.model.parameters()).device,
            tensors=lambda: moments,
        )
        saver = Saver(learner, folder)
        self._savers.append(saver)
        saver.save(seconds=0.0, keep=Keep(newest=1))
        return lambda: saver.path(step).is_dir()

    def save_torch_save(self, folder: Path, step: int) -> Callable[[], bool]:
        """One file by ``torch.save``, synced."""
        folder.mkdir()
        with open(folder / f"{step}.pt", "wb") as file:
            torch.save(self.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    def save_dcp_async_save(self, folder: Path, step: int) -> Callable[[], bool]:
        """``torch.distributed.checkpoint.async_save`` with its file writer."""
        import torch.distributed.checkpoint

        library: Any = torch.distributed.checkpoint
        future: Any = library.async_save(self.tensors(), checkpoint_id=folder / str(step))
        return lambda: bool(future.done()) and future.result() is not None


@contextmanager
def _one_process() -> Iterator[None]:
    """Open a group of one process, which ``async_save`` asks for."""
    import torch.distributed

    dist: Any = torch.distributed  # names that torch does not export for type checkers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
