"""Ray: tasks on two nodes of a local cluster give what one machine gives, also when one dies."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gear_offline.core.workers import RayPool
from gear_offline.data.convert.conversion import convert
from gear_offline.errors import GearError
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.sweep import sweep
from gear_offline.sweep.trials import SweepDirectory
from tests.support import contents, one_error, write_hdf5
from tests.test_sweep import table_of, wait_for
from tests.training_support import learnt, tiny_recipe

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gear-offline[ray]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.long,
]


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


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[str]:
    """Its address; jobs of one connection share their processes, which saves importing torch."""
    import ray

    ray.init(cluster.address, log_to_driver=False)
    yield cluster.address
    ray.shutdown()


def test_jobs_messages_and_errors(connected: str, tmp_path: Path) -> None:
    told: list[int] = []
    jobs = "tests.worker_jobs"
    with RayPool(connected) as pool:
        assert (pool.cpus, pool.node_cpus, pool.gpus, pool.workers) == (2, 1, 0, 2)
        assert pool.device("auto") == "cpu"
        with one_error("DEVICE"):
            pool.device("cuda:1")
        counted = pool.run(f"{jobs}:count_down", [(n,) for n in range(3)], on_message=told.append)
        assert list(counted) == ["lift-off"] * 3 and sorted(told) == [1, 1, 2]
        for how, code in (("input", "COLUMN"), ("other", "INTERNAL")):
            with one_error(code):
                list(pool.run(f"{jobs}:fail", [(how,)]))
        with one_error("INTERNAL", "nothing can be sent"):
            list(pool.run(f"{jobs}:listen", [()]))
        number = pool.submit(f"{jobs}:sleep", begun := tmp_path / "begun")
        while not begun.exists():  # a task that does not run yet may never hear of it
            time.sleep(0.02)
        pool.interrupt()
        ((ended, value),) = pool.wait(60.0)
        assert ended == number and isinstance(value, GearError) and value.code == "WORKER_LOST"


def test_every_node_has_to_see_the_folder(
    connected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayPool(connected) as pool:
        pool.check(tmp_path)
        assert list(tmp_path.iterdir()) == []
        with one_error("SYSTEM", "does not see"):
            pool.check(tmp_path / "nowhere")
        monkeypatch.setattr("gear_offline.core.workers.__version__", "0.0.1")
        with one_error("SYSTEM", "does not see"):
            pool.check(tmp_path)


def test_there_is_no_such_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with one_error("UNAVAILABLE", "ray start --head"):
        RayPool("nonsense")


def test_shards_are_those_of_one_machine(connected: str, tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "source.hdf5")
    convert(source, tmp_path / "here", shard_bytes=9_000, quiet=True)
    convert(source, tmp_path / "there", shard_bytes=9_000, ray=connected, quiet=True)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 2


def test_a_sweep_ends_complete_though_a_node_dies(
    cluster: Any, connected: str, data: Path, tmp_path: Path, no_reports: None
) -> None:
    out = tmp_path / "sweep"
    recipe = tiny_recipe(
        data, "evaluate.episodes=0", "train.steps=100", "train.checkpoint_every=10"
    )

    def kill_a_node() -> None:
        wait_for(lambda: all(steps_done(out / "runs" / name) > 20 for name in ("s0", "s1")))
        cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)

    thread = threading.Thread(target=kill_a_node)
    thread.start()
    result = sweep(recipe, seeds=3, out=out, ray=connected, quiet=True)
    thread.join()
    assert result.is_complete and SweepDirectory(out).read().failures == {}
    whole = sweep(recipe, seeds=3, out=tmp_path / "whole", parallel=1, quiet=True)
    assert table_of(result) == table_of(whole)
    for one, other in zip(result.trials, whole.trials, strict=True):
        assert learnt(one.path) == learnt(other.path)
