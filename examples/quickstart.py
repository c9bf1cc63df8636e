# %% [markdown]
# # Quickstart
#
# Data, training, a score and a policy that acts, in half a minute on a CPU:
# `pip install -e .` in a checkout of gear-offline, then `python examples/quickstart.py`, or the
# notebook of the same steps.

# %%
from pathlib import Path
from tempfile import mkdtemp

import gymnasium

import gear_offline as go

folder = Path(mkdtemp(prefix="quickstart-"))

# %% [markdown]
# CartPole pays 1 for each step that the pole stands, 500 at most. A small search makes policies of
# different quality; episodes of all of them are the data. Any HDF5 file, Minari or arrays would do.

# %%
options = {"policy": "ars", "quality": "mixed", "train_steps": 60_000}
go.collect("CartPole-v1", folder / "cartpole.hdf5", steps=5_000, quiet=True, **options)
go.convert(folder / "cartpole.hdf5", folder / "cartpole", quiet=True)
dataset = go.open_dataset(folder / "cartpole")  # every block is compared with its digest
print(len(dataset), "episodes; the best returned", dataset.returns.max())

# %% [markdown]
# What training sees: segments of 10 steps, each with the return that was still to come.

# %%
loader = go.GearLoader(dataset, batch_size=64, context_length=10, seed=0)
batch = next(iter(loader))
print(batch.states.shape, batch.returns_to_go.shape)

# %% [markdown]
# A Decision Transformer, from a recipe with a few options changed.

# %%
recipe = go.load_recipe(
    "cartpole",
    {
        "data": {"path": str(folder / "cartpole"), "collect": None},
        "train.steps": 200,
        "evaluate.episodes": 0,
    },
)
run = go.train(recipe, out=folder / "run", quiet=True)

# %% [markdown]
# Ask it for a return and count what it gets. `video="cartpole.gif"` would show the first episodes
# (`pip install 'gear-offline[video]'`).

# %%
report = go.evaluate(run, targets=500, episodes=5, quiet=True)
print(report)

# %% [markdown]
# The policy in a loop of your own: it takes raw observations and is told each reward.

# %%
policy = go.load_policy(run)
environment = gymnasium.make("CartPole-v1")
observation, _ = environment.reset(seed=0)
policy.reset([0], [500.0])
achieved, done = 0.0, False
while not done:
    [action] = policy.act(observation[None])
    observation, reward, ended, cut, _ = environment.step(int(action))
    policy.observe_reward([reward])
    achieved, done = achieved + float(reward), ended or cut
print("asked 500, achieved", achieved, "in", folder)
