"""The Online Decision Transformer: stochastic policies, and runs that begin with another one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions as D

import gear_offline as go
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.evaluation.collect.record import stream
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.gaussian import Gaussian, gaussian_losses
from gear_offline.models.hugging_face import to_released
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.training.parallel import choose_parallel
from tests.ranks_support import fork_ranks
from tests.support import make_dataset, one_error
from tests.test_resume import interrupted_in
from tests.training_support import ENVIRONMENT, learnt, played_data, tiny_recipe

DOOR: Any = go
COLUMNS = ("observations", "actions", "rewards")
POLICY = ("model.policy=gaussian", "evaluate.episodes=0")

pytestmark = pytest.mark.usefixtures("no_reports")


def oracle(predictions: Any, *, squashed: bool) -> Any:
    """Return what `Gaussian.of` makes of predictions, as torch has it."""
    mean, raw = predictions.double().chunk(2, -1)
    normal = D.Normal(mean, torch.exp(-5 + 3.5 * (raw.tanh() + 1)))
    some = D.TransformedDistribution(normal, [D.TanhTransform()]) if squashed else normal
    return D.Independent(some, 1)


@pytest.mark.parametrize("squashed", [False, True])
def test_density_entropy_and_draws_are_those_of_torch(squashed: bool) -> None:
    torch.manual_seed(0)
    noise, some = torch.randn(40_000, 3, 4, 3), {"squashed": squashed}
    predictions = 0.3 * torch.randn(3, 4, 6) - 0.3  # no action is 1: of that no oracle tells
    mine, theirs = Gaussian.of(predictions, **some), oracle(predictions, **some)
    drawn = mine.sample(noise)
    found, expected = mine.log_probability(drawn[0]), theirs.log_prob(drawn[0].double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(mine.log_probability(torch.ones(3, 4, 3))).all()
    entropy = -theirs.log_prob(drawn.double().clamp(-1 + 1e-7, 1 - 1e-7) if squashed else drawn)
    found = mine.entropy(noise).mean(0).double()
    torch.testing.assert_close(found, entropy.mean(0).double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("squashed", [False, True])
def test_loss_and_temperature_learn_as_in_the_paper(squashed: bool) -> None:
    """Likelihood, entropy bonus, and the dual step towards an entropy of -A, written out."""
    torch.manual_seed(1)
    actions, given = torch.rand(2, 5, 3) * 1.8 - 0.9, (torch.randn(2, 5, 6), torch.tensor(-1.0))
    mine: Any = [tensor.clone().requires_grad_() for tensor in given]
    theirs: Any = [tensor.clone().double().requires_grad_() for tensor in given]
    torch.manual_seed(7)
    together = torch.cat((mine[0], mine[1].expand(2, 5, 1)), -1)
    loss: Any = gaussian_losses(together, actions, squashed=squashed)
    loss.mean().backward()
    torch.manual_seed(7)
    policy = Gaussian.of(theirs[0], squashed=squashed)
    entropy, likelihood = policy.entropy(torch.randn(2, 5, 3)), oracle(theirs[0], squashed=squashed)
    expected = -(likelihood.log_prob(actions.double()) + theirs[1].detach().exp() * entropy)
    (expected.mean() + theirs[1].exp() * (entropy.mean() + 3).detach()).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


def test_a_stochastic_run_resumes_bit_for_bit_and_acts_by_its_mean(
    data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, *POLICY, "optimizer.clip_norm=0.25")
    run = go.train(recipe, out=tmp_path / "run", quiet=True)
    with interrupted_in(7), pytest.raises(TrainingInterrupted):
        go.train(recipe, out=tmp_path / "again", quiet=True)
    resumed = go.train(recipe, out=tmp_path / "again", resume=True, quiet=True)
    assert learnt(resumed.path) == learnt(run.path)
    temperatures = run.metrics["temperature"]
    assert temperatures.nunique() == len(temperatures) and abs(temperatures - 0.1).max() < 1e-3
    policy = run.policy(device="cpu")
    saved = go.load_policy(policy.save(tmp_path / "policy"), device="cpu")
    seen = np.random.default_rng(0).normal(size=(2, policy.state_dim))
    acted = []
    for number, one in enumerate((policy, saved, policy, policy, policy)):
        one.reset([0, 1], [3.0, 1.0])
        generator = np.random.default_rng(number // 4) if number > 1 else None
        acted.append(one.act(seen, generator=generator))
    mean, again, drawn, same, other = acted
    assert np.array_equal(mean, again) and np.array_equal(drawn, same)
    assert (drawn != mean).all() and (drawn != other).all() and np.abs(drawn).max() < 1
    inputs = {"states": torch.randn(2, 4, policy.state_dim), "returns_to_go": torch.ones(2, 4, 1)}
    inputs["actions"] = torch.zeros(2, 4, policy.action_dim)
    inputs["timesteps"] = torch.arange(4).expand(2, 4)
    assert isinstance(policy.model, DecisionTransformer)
    plain = to_released(policy.model)  # the means are the released class's actions
    with torch.no_grad():
        ours, theirs = (one.eval()(**inputs).action_preds for one in (policy.model, plain))
    torch.testing.assert_close(ours, theirs)


def test_a_run_begins_with_the_weights_and_scales_of_another(data: Path, tmp_path: Path) -> None:
    """On other data: what it acted with is kept, in checkpoints and in what is learnt from."""
    first = go.train(tiny_recipe(data, *POLICY), out=tmp_path / "first", quiet=True)
    other = make_dataset(tmp_path / "other", [5, 4], state_dim=3, action_dim=2, seed=9).path
    still = ("optimizer.learning_rate=1e-30", "train.steps=1", "optimizer.weight_decay=0")
    for start in (first.path, first.policy().save(tmp_path / "policy")):
        begun = (f"train.init={start}", "loader.returns_scale=3", *still)
        run = go.train(
            tiny_recipe(other, *POLICY, *begun), out=tmp_path / f"on-{start.name}", quiet=True
        )
        before, after = first.policy(), run.policy()
        for name, tensor in before.model.state_dict().items():
            torch.testing.assert_close(after.model.state_dict()[name], tensor, rtol=1e-3, atol=0)
        assert run.recipe.loader.returns_scale == after.returns_scale == 10
        assert np.array_equal(np.array(after.statistics), np.array(before.statistics))
    with pytest.raises(InputError, match="embed_action"):
        wide = tiny_recipe(other, *POLICY, *begun, "model.hidden_size=16")
        go.train(wide, out=tmp_path / "wide", quiet=True)


@pytest.mark.usefixtures("forked_workers")
def test_actors_draw_and_ask_for_the_target(tmp_path: Path) -> None:
    path = played_data(tmp_path / "played")
    recipe = tiny_recipe(path, *POLICY, "data.admit_every=10", "evaluate.targets=[3]")
    recipe = recipe.replace({"evaluate.environment": ENVIRONMENT})
    run = go.train(recipe, out=tmp_path / "run", quiet=True)
    DOOR.act(run.path, episodes=1, seed=1, quiet=True)
    go.train(recipe, out=tmp_path / "next", quiet=True)
    episode, generator, policy = go.open_dataset(path)[3], stream(1, 0, 0), run.policy(device="cpu")
    policy.reset(3.0)
    for seen, done, reward in zip(*(episode[name] for name in COLUMNS), strict=True):
        np.testing.assert_allclose(policy.act(seen[None], generator=generator)[0], done, atol=1e-5)
        policy.observe_reward([reward])


def test_ranks_take_the_temperature_together(tmp_path: Path) -> None:
    """Without squashing the entropy is exact, so two ranks learn what one process learns."""
    data = make_dataset(tmp_path / "data", [9, 30, 4, 17, 25]).path
    options = ("model.action_tanh=false", "model.dropout=0", "train.deterministic=true")
    recipe = tiny_recipe(data, *POLICY, *options)
    (file := tmp_path / "two.yaml").write_text(recipe.to_yaml())
    one = go.train(recipe, out=tmp_path / "one", quiet=True)
    done = fork_ranks(2, "-m", "gear_offline", "train", file, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    for name in ("loss", "temperature"):
        both = [go.open_run(run).metrics[name] for run in (one.path, tmp_path / "two")]
        np.testing.assert_allclose(both[0], both[1], rtol=1e-4)


def test_what_a_stochastic_policy_is_not_for_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="continuous actions"):
        build_model(state_dim=3, action_dim=2, discrete=True, policy="gaussian")
    learns = tiny_recipe(data, *POLICY, "selection.strategy=prioritized")
    with pytest.raises(InputError, match="may be negative"):
        go.train(learns, out=tmp_path / "run", quiet=True)
    sharded, two = tiny_recipe(data, *POLICY, "train.parallel=fsdp"), World(nodes=(0, 0))
    with one_error("MODEL", "as replicas, not as shards"):
        choose_parallel(sharded, 1000, two, torch.device("cpu"), half=False)
    plain = go.train(tiny_recipe(data, "evaluate.episodes=0"), out=tmp_path / "plain", quiet=True)
    policy = plain.policy(device="cpu")
    policy.reset(1.0)
    with pytest.raises(InputError, match="deterministic"):
        policy.act(np.zeros((1, policy.state_dim)), generator=np.random.default_rng())
