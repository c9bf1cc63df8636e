"""Parts that somebody else may have written: what tests of them share."""

NET = '''
import torch
from torch import nn

import gear_offline as go
from beside import squared


class Net(go.SequenceModel):
    """Two losses, batch norm, an LSTM, dropout, buffers that are not saved, a head unused."""

    class Settings(go.ModelSettings):
        width: int = 8
        sizes: tuple[int, ...] = (8, 8)

    def __init__(self, facts, settings):
        super().__init__()
        seen = facts.state_dim + facts.action_dim
        self.enter = nn.Linear(seen, settings.width)
        self.norm = nn.BatchNorm1d(settings.width)
        self.lstm = nn.LSTM(settings.width, settings.width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.action = nn.Linear(settings.width, facts.action_dim)
        self.state = nn.Linear(settings.width, facts.state_dim)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("share", torch.full((1,), 0.5), persistent=False)

    def hidden(self, batch):
        before = torch.roll(batch.actions, 1, 1)
        before[:, 0] = 0
        hidden = self.enter(torch.cat([batch.states, before], -1))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.drop(self.lstm(hidden)[0])

    def predict(self, batch):
        return torch.tanh(self.action(self.hidden(batch)))

    def losses(self, batch):
        hidden = self.hidden(batch)
        following = torch.roll(batch.states, -1, 1)
        return {
            "imitation": squared(torch.tanh(self.action(hidden)), batch.actions),
            "dynamics": self.share * squared(self.state(hidden), following),
        }
'''
BESIDE = "def squared(a, b):\n    return ((a - b) ** 2).mean(-1)\n"
STRATEGY = """
import numpy as np
from pydantic import PositiveFloat


def fading(facts, half_life: PositiveFloat = 100.0):
    ages = np.arange(facts.episodes.episodes)[::-1]
    return 0.5 ** (ages / half_life)
"""
ENVIRONMENT = """
import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    def __init__(self, goal=0.5):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Box(-2, 2, (1,), np.float32)
        self.goal = goal

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=3).astype(np.float32), 0
        return self.x.copy(), {}

    def step(self, action):
        self.x = (0.9 * self.x + 0.1 * float(action[0])).astype(np.float32)
        self.t += 1
        return self.x.copy(), -float(abs(self.x - self.goal).sum()), False, self.t >= 9, {}
"""
