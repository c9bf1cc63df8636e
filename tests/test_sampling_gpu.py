"""Every sampler on the GPU: segments, probabilities, batches, priorities are the CPU's."""

from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders.feedback import DeviceFeedback, LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.sampling import Facts, Sampler, WeightedEpisodes, make_sampler
from tests.gpu_support import NEEDS_CUPY, ON_GPU, same
from tests.sampling_support import prioritized
from tests.support import hopper_columns, make_dataset

pytestmark = [*ON_GPU, NEEDS_CUPY]
LENGTHS = [4, 1, 30, 7, 19, 2, 60]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = hopper_columns(sum(LENGTHS))
    columns["rewards"] = np.abs(columns["rewards"])  # `weighted` draws by them
    return make_dataset(tmp_path_factory.mktemp("samplers"), LENGTHS, columns=columns)


def draws_alone(sampler: Sampler, count: int, **options: int) -> GpuGather:
    """A gather of no columns."""
    offsets = sampler.index.offsets
    shape: dict[str, Any] = {"context_length": 1, "rank_batch": count, **options}
    return GpuGather([], offsets, device=CUDA, draw=sampler.gpu, **shape)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    sampler = prioritized([50] * 1000)
    tree = sampler.on_device(CUDA)
    drawing = draws_alone(sampler, 20_000)
    losses = torch.rand(20_000, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (64, 20_000):
            names = drawing.draw_and_gather(3, 1).segments
            tree.update(names[0, :count], losses[:count])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tree.updates == 2 and tree.total == int(tree.masses.sum())


def test_beyond_2_to_the_24_and_over_twelve_orders_of_magnitude() -> None:
    count = (1 << 24) + 5
    weights = np.ones(count)
    weights[count // 2 :] = 1e-12
    weights[-3:] = [1e7, 0.0, 0.0]

    class Given(WeightedEpisodes):
        def weights(self, facts: Facts) -> Any:
            return weights

    sampler = Given(Facts(episodes=EpisodeIndex(np.ones(count, np.int64))))
    names = draws_alone(sampler, 100_000, seed=11).draw_and_gather(0, 1).segments
    expected = sampler.sample(11, 0, 1, 100_000).episodes
    assert np.array_equal(names[..., 0].cpu().numpy(), expected)


def test_feedback_in_a_graph(dataset: Any) -> None:
    """Select, gather, weigh and update, replayed: batches and masses are those of the CPU."""
    sampler, reference = (
        make_sampler("prioritized", dataset, context_length=8, beta_steps=20) for _ in range(2)
    )
    shape: dict[str, Any] = {"batch_size": 33, "context_length": 8, "seed": 5}
    gpu = GearLoader(dataset, device="cuda", engine="on", selection=sampler, **shape)
    cpu = GearLoader(dataset, device="cpu", selection=reference, **shape)
    batches = gpu.static_batch(ahead=True)
    feedback, host = DeviceFeedback(gpu, batches), LossFeedback(cpu)

    def losses_of(batch: Any) -> torch.Tensor:
        names: torch.Tensor = batch.segments
        return (names[:, 0] * 7 + names[:, 1] * 3 + 1).remainder(23) / 8

    def step() -> None:
        batches.begin()
        feedback.importance()
        feedback.update(batches.batch, losses_of(batches.batch))
        batches.end()

    with feedback.paused():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batches.set_step(0)
    for _ in range(100):
        graph.replay()
        batch = next(cpu)
        same(batches.batch, batch)
        np.testing.assert_array_max_ulp(
            feedback._weights.cpu().numpy(), host.importance().numpy(), maxulp=1
        )
        host.update(batch, losses_of(batch))
    assert gpu.loss_sampler is not None and cpu.loss_sampler is not None
    assert gpu.loss_sampler.updates == cpu.loss_sampler.updates == 100
    mine, theirs = gpu.loss_sampler.state(), cpu.loss_sampler.state()
    assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
