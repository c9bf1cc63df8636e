"""Ray: tasks on two nodes of a local cluster give what one machine gives, also when one dies."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gear_offline.sweep.results import steps_done
from gear_offline.sweep.run import sweep
from gear_offline.sweep.trials import make_trials
from tests.test_sweep import table_of, wait_for
from tests.training_support import learnt, tiny_recipe

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gear-offline[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each; the second one dies in the last test."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("PYTHONPATH", os.getcwd())
        small: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
        cluster.add_node(num_cpus=1, **small)
        yield cluster
        cluster.shutdown()


def test_a_sweep_ends_complete_though_a_node_dies(
    cluster: Any, data: Path, tmp_path: Path, no_reports: None
) -> None:
    out, options = tmp_path / "sweep", {"optimizer.learning_rate": [1e-2, 1e-3]}
    recipe = tiny_recipe(
        data, "evaluate.episodes=0", "train.steps=300", "train.checkpoint_every=20"
    )
    names = [trial.name for trial in make_trials(recipe, options, [0, 1])]

    def kill_a_node() -> None:
        wait_for(lambda: all(steps_done(out / "runs" / name) > 40 for name in names[:2]))
        cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)

    thread = threading.Thread(target=kill_a_node)
    thread.start()
    result = sweep(recipe, options, seeds=2, out=out, ray=cluster.address, quiet=True)
    thread.join()
    assert result.is_complete and not (out / "failures.jsonl").exists()
    whole = sweep(recipe, options, seeds=2, out=tmp_path / "whole", parallel=1, quiet=True)
    assert table_of(result) == table_of(whole)
    for one, other in zip(result.trials, whole.trials, strict=True):
        assert learnt(one.path) == learnt(other.path)
