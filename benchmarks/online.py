"""Does a policy get better by its own episodes?  Online Decision Transformer, seed by seed.

    python -m benchmarks.online hopper-medium-replay.hdf5 --seeds 0 1 2 3 4 --out online.json

A seed is a process: it learns offline, and goes on twice with four times as many updates, *online*
with its own episodes, and *longer* without.  All play the same ones to be judged.  Seeds in OUT
stay.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from scipy import stats

import gear_offline as go
from gear_offline.core.files import write_file

COLUMNS = ["observations", "actions", "rewards", "terminals", "timeouts"]
RECIPE, TARGET, ENVIRONMENTS, PORTIONS = "online-hopper", 3600.0, 16, 10
# offline updates, updates and environment steps of a portion, episodes that are compared
SCALES = {"full": (5_000, 2_000, 10_000, 50), "small": (400, 50, 2_500, 20)}
SMALL = ("model.hidden_size=32", "model.layers=1", "loader.batch_size=64")


class Explorer(go.Callback):
    """Plays whole episodes with the newest weights, and appends them, before each portion."""

    def __init__(self, data: Path, steps: int, seed: int) -> None:
        self.appender, self.steps, self.seed = go.Appender(data), steps, seed
        self.generator, self.played = np.random.default_rng(seed), 0
        self.name = go.open_dataset(data).environment_id or "Hopper-v5"

    def on_begin(self, run: go.Run) -> None:
        self.on_checkpoint(run, 0, Path(str(run.recipe.train.init)))

    def on_checkpoint(self, run: go.Run, step: int, path: Path) -> None:
        policy, train = go.load_policy(path), run.recipe.train
        wanted = self.steps * (step // train.checkpoint_every + 1) if step < train.steps else 0
        while self.played < wanted:
            self.appender.append(episodes := self.play(policy))
            self.played += sum(len(episode["rewards"]) for episode in episodes)
            mean = np.mean([episode["rewards"].sum() for episode in episodes])
            print(f"seed {self.seed}: {self.played} steps played, mean {mean:.0f}", flush=True)

    def play(self, policy: Any) -> list[dict[str, Any]]:
        worlds = [gymnasium.make(self.name) for _ in range(ENVIRONMENTS)]
        now = [w.reset(seed=int(self.generator.integers(1 << 31)))[0] for w in worlds]
        steps: list[list[Any]] = [[] for _ in worlds]
        policy.reset(playing := np.arange(ENVIRONMENTS), TARGET)
        while playing.size:
            actions = policy.act([now[n] for n in playing], playing, generator=self.generator)
            for number, action in zip(playing, actions, strict=True):
                after, reward, ended, cut, _ = worlds[number].step(action)
                steps[number].append((now[number], action, reward, ended, cut and not ended))
                now[number] = after
            policy.observe_reward([steps[number][-1][2] for number in playing], playing)
            playing = playing[[not any(steps[number][-1][3:]) for number in playing]]
        return [dict(zip(COLUMNS, map(np.array, zip(*rows)))) for rows in steps]  # noqa: B905


def run_seed(data: str, seed: int, scale: str, options: list[str]) -> dict[str, Any]:
    offline, updates, steps, episodes = SCALES[scale]
    row: dict[str, Any] = {"seed": seed}
    with tempfile.TemporaryDirectory(prefix="gear-online-") as folder:
        go.convert(data, place := Path(folder, "data"), columns=COLUMNS, quiet=True)
        explorer = Explorer(place, steps, seed)
        words = [f"data.path={place}", "data.source=null", f"train.checkpoint_every={updates}"]
        words += [f"evaluate.environment={explorer.name}", "evaluate.episodes=0", f"seed={seed}"]
        words += ["train.trackers=[]", "train.threads=1", "train.compile=off"]  # it does not pay
        words += [f"data.admit_every={min(100, updates)}", *SMALL * (scale == "small"), *options]
        further = [f"optimizer.warmup_steps={updates // 2}", f"train.init={folder}/offline"]
        further.append(f"train.steps={PORTIONS * updates}")
        for name in ("offline", "online", "longer"):
            own = [f"train.steps={offline}", "data.max_size=null"] if name == "offline" else further
            began, calls = time.perf_counter(), [explorer] * (name == "online")
            run = go.train(RECIPE, words + own, out=f"{folder}/{name}", callbacks=calls, quiet=True)
            row[f"{name}_seconds"] = time.perf_counter() - began
            row[name] = [*run.evaluate(episodes=episodes, quiet=True).tasks[0].targets[0].returns]
            seconds = time.perf_counter() - began
            print(f"seed {seed}, {name}: {np.mean(row[name]):.0f} in {seconds:.0f} s", flush=True)
    return row | {"steps": explorer.played}


def difference(values: Any) -> str:
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval()
    return f"{np.mean(values):.0f} ({low:.0f} .. {high:.0f})"


def measure(data: str, seeds: list[int], out: Path, scale: str, options: list[str]) -> Any:
    seen = json.loads(out.read_text())["results"] if out.exists() else []
    document: dict[str, Any] = {"scale": scale, "options": options, "results": seen}
    with ProcessPoolExecutor(len(seeds), get_context("spawn")) as pool:
        left = {*seeds} - {row["seed"] for row in seen}
        work = (pool.submit(run_seed, data, seed, scale, options) for seed in left)
        for done in as_completed(work):
            seen.append(row := done.result())
            for peer in ("offline", "longer"):
                row[f"{peer}_difference"] = difference(np.subtract(row["online"], row[peer]))
                means = [np.mean(r["online"]) - np.mean(r[peer]) for r in seen]
                document[f"mean_{peer}_difference"] = difference(means) if len(seen) > 1 else None
            write_file(out, json.dumps(document, indent=1).encode())
            print({k: v for k, v in (document | row).items() if type(v) is not list}, flush=True)
    return document


def run(*, quick: bool = False) -> Any:
    """Measure three seeds on D4RL's data, which are downloaded; `quick`: one, small."""
    seeds, scale = ([0], "small") if quick else ([0, 1, 2], "full")
    out = Path(tempfile.mkdtemp(), "online.json")
    return measure("d4rl:hopper-medium-replay-v2", seeds, out, scale, [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="options of the recipe may follow: KEY=VALUE")
    parser.add_argument("data", help="as gear-offline convert takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--out", type=Path, default=Path("online.json"))
    chosen, words = parser.parse_known_args()
    measure(chosen.data, chosen.seeds, chosen.out, chosen.scale, words)
