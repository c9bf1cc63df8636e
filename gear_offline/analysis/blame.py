"""Find the data in the batches of a loss spike, and whether they explain it.

The batch of any step is known, so training records nothing.  `blame` computes the losses of the
spike's batches, and of as many before it, under a checkpoint of the run.

Shape legend: n batches, B windows of a batch, w windows of all of them, E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.analysis.spikes import (
    Spike,
    find_batches,
    find_spikes,
    list_batches,
    logged_losses,
)
from gear_offline.artifacts.checkpoint import list_checkpoints, no_run, read_checkpoint
from gear_offline.artifacts.trained import trained_model, typed_model
from gear_offline.batches.sampling import Sampler
from gear_offline.batches.tables.joint import JointDataset, TableData, stored_number
from gear_offline.config.arguments import check_arguments
from gear_offline.config.recipe import Recipe
from gear_offline.core.progress import Progress, Terminal, print_table
from gear_offline.core.text import Document, quote, short
from gear_offline.core.torch_state import torch_threads
from gear_offline.core.types import Int64Array
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.base import SequenceModel, total_loss
from gear_offline.models.loss import segment_losses
from gear_offline.runs.run import Run, open_run

DATA, PART = 0.5, 0.1  # shares of a rise from which on it is due to the data, or in part
SHOWN, NAMED = 10, 3  # episodes that are printed, and that are printed with their source
DRAWS_AT_ONCE = 1 << 20
HEADINGS = ("episode", "return", "length", "drawn", "usual", "seen", "loss", "adds", "worst")
WINDOW = np.dtype(
    [("batch", "i8"), ("episode", "i8"), ("start", "i8"), ("loss", "f8"), ("steps", "i8")]
)


@dataclass(frozen=True, kw_only=True)
class BlamedEpisode:
    """An episode in the batches that are blamed; its windows are those in these batches."""

    episode: int  # number in the run's data
    source: str  # the file and the number there, as far as the dataset says
    episode_return: float
    length: int
    drawn: int  # windows
    usual: float  # windows in as many batches, on average before
    seen: int  # windows in all batches before
    loss: float  # mean over the real steps of its windows
    adds: float  # to the mean loss of these batches, over an ordinary window; all sum to the rise
    batch: int  # of its window of the largest loss, ...
    start: int  # ... and at which step of the episode that begins

    def cells(self) -> list[str]:
        """Return its row of the table that is printed, by `HEADINGS`."""
        return [
            *(str(self.episode), short(self.episode_return), str(self.length), str(self.drawn)),
            *(f"{self.usual:.1f}", f"{self.seen:,}", f"{self.loss:.3g}", f"{self.adds:+.3g}"),
            f"{self.batch:,}: {self.start:,}..",
        ]


@dataclass(frozen=True, kw_only=True)
class Blame(Document):
    """The findings of `blame`."""

    run: str
    first: int  # batches, both included, counted from 0
    last: int
    checkpoint: int  # step of the one under which losses were computed
    loss: float  # means of these batches, and of as many ordinary ones, under that checkpoint
    ordinary_loss: float
    spike: Spike | None  # the first one that was logged for them
    explained: float | None  # share of the spike's rise that these batches show there
    verdict: str
    without: list[list[int]] | None  # `train.skip` of them; None: the checkpoint has seen them
    episodes: tuple[BlamedEpisode, ...]  # by what they add, the most first

    def print(self) -> None:
        """Print the verdict and the episodes that add most."""
        console = Terminal()
        console.print(f"{self.run}, batches {self.first:,} to {self.last:,}")
        console.print(self.verdict, style="bold")
        text = f"under checkpoint {self.checkpoint:,}: loss {self.loss:.3g}, of ordinary batches "
        text += f"{self.ordinary_loss:.3g}"
        if self.spike is not None:
            text += f"; logged: {self.spike.loss:.3g}, before {self.spike.usual:.3g}"
        console.print(text)
        print_table(console, HEADINGS, [episode.cells() for episode in self.episodes[:SHOWN]])
        for episode in self.episodes[:NAMED]:
            console.print(f"{episode.episode} is {episode.source}", style="dim")
        if self.without is not None:
            skip = str(self.without).replace(" ", "")
            command = f"gear-offline train {quote(self.run)} --checkpoint {self.checkpoint}"
            console.print(f"without these batches: {command} 'train.skip={skip}'")


@torch_threads(None)
@check_arguments()
def blame(
    run: Run | str | os.PathLike[str],
    first: int,
    last: int,
    *,
    device: str = "auto",
    quiet: bool = True,
    model: Any = None,
) -> Blame:
    """Find the data in a range of a run's batches, and whether they explain a spike of its loss.

    The losses of their windows are computed without dropout, under the newest checkpoint that was
    saved before them (else the oldest), and compared with those of as many batches before.

    Parameters
    ----------
    run
        A run directory, complete or not.
    first, last
        Batches, counted from 0, both included: optimiser step ``s``, counted from 0 too, takes
        batch ``s`` unless `train.skip` leaves some out.  `find_spikes` suggests ranges.
    device
        ``"auto"`` (CUDA if there is one), or a torch device.
    quiet
        Show no progress.
    model
        As of `gear_offline.load_policy`.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND`` without a checkpoint; ``USAGE`` for a range without batches;
        ``SELECTION`` where what was drawn is not known any more, for a strategy that learns from
        losses or for data that grew; ``LOADER_STATE`` if the data are not those of the run.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> page = go.blame("runs/tiny", 2, 3, device="cpu")
    >>> page.checkpoint, sum(episode.drawn for episode in page.episodes)
    (4, 32)
    """
    opened = run if isinstance(run, Run) else open_run(run)
    recipe = opened.recipe
    if recipe.data.admit_every is not None:
        raise _unknown(opened, "the data grew while the run trained")
    if recipe.loader.span == "history":
        raise _unknown(opened, "a window goes over several episodes")
    batches, past = find_batches(opened, first, last), list_batches(recipe, 0, first)
    last = min(last, recipe.train.batch_of(recipe.train.steps - 1))
    ordinary = list_batches(recipe, max(0, first - len(batches)), first)
    if not len(ordinary):
        ordinary = list_batches(recipe, last + 1, last + 1 + len(batches))
    saved = list_checkpoints(opened.path / "checkpoints")
    if not saved:
        raise no_run(opened.path)
    earlier = [entry for entry in saved if recipe.train.batch_of(entry[0]) <= first]
    checkpoint = read_checkpoint((earlier or saved[:1])[-1][1], training=False)
    options: Any = {"device": device, "engine": "auto", "placement": "auto", "world": None}
    with GearLoader.of_recipe(recipe, **options) as loader:
        if loader.loss_sampler is not None:
            raise _unknown(opened, f"what {loader.selection.name} drew depends on losses")
        loader.load_state_dict(checkpoint.state.loader)  # refuses other data
        numbers = np.concatenate([ordinary, batches]).tolist()
        trained = trained_model(checkpoint, typed_model(model)).model
        windows = _windows(loader, trained, numbers, opened.name, quiet)
    is_blamed = (windows["batch"] >= first) & (windows["batch"] <= last)
    blamed, ordinary_windows = windows[is_blamed], windows[~is_blamed]
    loss, usual = (
        float(np.average(w["loss"], weights=w["steps"])) for w in (blamed, ordinary_windows)
    )
    counts = _draws(loader.selection, recipe, past)
    share = len(batches) / max(1, len(past))
    episodes = _episodes(blamed, loader.dataset, usual, counts, share)
    spike = next((s for s in find_spikes(opened) if s.first <= last and s.last >= first), None)
    explained = None
    if spike is not None:  # sums over batches: a record may have more of them than are asked for
        near = logged_losses(opened, first, last)
        rise = sum((logged - spike.usual) * (end + 1 - begin) for begin, end, logged in near)
        explained = float(np.clip((loss - usual) * len(batches) / max(rise, 1e-30), 0, 1))
    return Blame(
        run=str(opened.path),
        first=first,
        last=last,
        checkpoint=checkpoint.state.step,
        loss=loss,
        ordinary_loss=usual,
        spike=spike,
        explained=explained,
        verdict=_verdict(explained, loss, usual, episodes[0]),
        without=[*map(list, sorted({*recipe.train.skip, (first, last)}))] if earlier else None,
        episodes=episodes,
    )


def _unknown(run: Run, problem: str) -> InputError:
    remedy = "only windows of one episode, of fixed data and strategies that do not learn, tell"
    return InputError("SELECTION", problem, str(run.path), remedy)


@torch.inference_mode()
def _windows(
    loader: GearLoader, model: SequenceModel, batches: Sequence[int], name: str, quiet: bool
) -> npt.NDArray[Any]:
    """Return (w,) the windows of some batches, with their losses under the weights of a model."""
    model.train(False).to(loader.device)
    tables, total = [], len(batches)
    with Progress(f"blame {name}", total=total, unit="batches", quiet=quiet) as progress:
        for number in batches:
            batch = loader.batch_at(number)
            mask = batch.attention_mask
            losses = segment_losses(total_loss(model.losses(batch)).float(), mask)
            table = np.empty(len(batch.segments), WINDOW)
            table["batch"], table["loss"] = number, losses.double().cpu().numpy()
            table["episode"], table["start"] = batch.segments.cpu().numpy().T
            table["steps"] = mask.sum(1).cpu().numpy()
            tables.append(table)
            progress.advance(1)
    return np.concatenate(tables)


def _draws(sampler: Sampler, recipe: Recipe, batches: Int64Array) -> Int64Array:
    """Return (E,): windows of each episode in rising `batches` (n,)."""
    counts, size = np.zeros(sampler.index.episodes, np.int64), recipe.loader.batch_size
    at_once = max(1, DRAWS_AT_ONCE // size)
    for begin in range(0, len(batches), at_once):
        chunk = batches[begin : begin + at_once]
        first, end = int(chunk[0]), int(chunk[-1]) + 1
        episodes = sampler.sample(recipe.seed, first, end - first, size).episodes[chunk - first]
        counts += np.bincount(episodes.reshape(-1), minlength=counts.size)
    return counts


def _episodes(
    windows: npt.NDArray[Any], data: TableData, usual: float, counts: Int64Array, share: float
) -> tuple[BlamedEpisode, ...]:
    """Return the episodes of windows, those that add most first; `share` of `counts` is usual."""
    real, rows = int(windows["steps"].sum()), []
    for episode in np.unique(windows["episode"]).tolist():
        episode_windows = windows[windows["episode"] == episode]
        steps = episode_windows["steps"].sum()
        total = float(episode_windows["steps"] @ episode_windows["loss"])
        worst = episode_windows[episode_windows["loss"].argmax()]
        rows.append(
            BlamedEpisode(
                episode=stored_number(data, episode),
                source=_source(data, episode),
                episode_return=float(data.returns[episode]),
                length=int(data.episodes.lengths[episode]),
                drawn=len(episode_windows),
                usual=float(counts[episode] * share),
                seen=int(counts[episode]),
                loss=float(total / steps),
                adds=float((total - steps * usual) / real),
                batch=int(worst["batch"]),
                start=int(worst["start"]),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.adds))


def _source(data: TableData, episode: int) -> str:
    """Return the source of an episode, as far as its dataset records it."""
    if isinstance(data, JointDataset):
        task = int(np.searchsorted(data.first_episodes, episode, side="right")) - 1
        member = data.tasks[task]
        return f"{member.name}: {_source(member.dataset, episode - int(data.first_episodes[task]))}"
    source, episode = data.manifest.source, stored_number(data, episode)
    number = episode
    if {"picked", "edits"} & set(source.attributes):
        return f"episode {episode} of what is kept of {source.uri}"
    if len(source.files) == data.manifest.episodes > 1:
        return source.files[episode].name
    sources = [pair for pair in source.attributes.get("part_episodes", ()) if len(pair) == 2]
    for uri, count in sources:  # the first of many
        if number < count:
            return f"episode {number} of {uri}"
        number -= count
    return f"episode {episode} of {source.uri}"


def _verdict(explained: float | None, loss: float, usual: float, first: BlamedEpisode) -> str:
    if explained is None:
        return f"No spike was logged here: loss {loss:.3g}, of ordinary batches {usual:.3g}"
    text = f"the data: they explain {explained:.0%} of the rise"
    if explained < PART:
        return f"Not {text}"
    alone = f", episode {first.episode} alone {explained * first.adds / (loss - usual):.0%}"
    return ("Due to " if explained >= DATA else "In part ") + text + alone
