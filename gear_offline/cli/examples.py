"""What stands under "Examples" in the help of each command.

A line is short enough for a terminal of 60 columns, so that nothing wraps it and it can be copied;
what needs more goes on after a backslash.  The plainest example comes first.
"""

from __future__ import annotations

# By command, "" for the program itself.
EXAMPLES = {
    "": """
gear-offline recipes ls
gear-offline train smoke
gear-offline evaluate runs/smoke-s0
""",
    "convert": r"""
gear-offline convert mine.hdf5 data/mine
gear-offline convert d4rl:hopper-medium-v2 data/hopper
gear-offline convert mine.hdf5 data/renamed --columns \
  observations=obs,actions=act,rewards=r,dones=end
""",
    "export": """
gear-offline export data/mine mine.hdf5
""",
    "inspect": """
gear-offline inspect data/mine
gear-offline inspect data/mine --no-verify --json
""",
    "collect": r"""
gear-offline collect Pendulum-v1 pendulum.hdf5
gear-offline collect Hopper-v5 hopper.hdf5 \
  --policy ars --quality mixed --steps 1e5
""",
    "recipes": """
gear-offline recipes ls
gear-offline recipes cp hopper-medium mine.yaml
gear-offline recipes validate mine.yaml train.steps=1e4
""",
    "recipes ls": """
gear-offline recipes ls
gear-offline recipes ls --json
""",
    "recipes cp": """
gear-offline recipes cp hopper-medium
gear-offline recipes cp hopper-medium mine.yaml
""",
    "recipes validate": """
gear-offline recipes validate smoke
gear-offline recipes validate mine.yaml train.steps=1e4
""",
    "train": """
gear-offline train smoke
gear-offline train hopper-medium train.steps=20000
gear-offline train runs/hopper-medium-s0 --resume
""",
    "evaluate": r"""
gear-offline evaluate runs/smoke-s0
gear-offline evaluate runs/hopper-medium-s0 \
  --targets 3600,1800 --episodes 100 --checkpoint best
""",
    "doctor": """
gear-offline doctor
gear-offline doctor --json
""",
    "strategies": r"""
gear-offline strategies smoke
gear-offline strategies hopper-medium \
  --strategies top_percent,top_k:k=50
gear-offline strategies hopper-medium --train --seeds 5
""",
    "plan": r"""
gear-offline plan hopper-medium --gpus 4
gear-offline plan dt_1b --nodes 8 --gpus 8 \
  --data 10TB --columns \
  'observations=f4[17],actions=f4[6],rewards=f4'
""",
    "sweep": r"""
gear-offline sweep smoke --seeds 3
gear-offline sweep hopper-medium --seeds 3,5,7 \
  optimizer.learning_rate=1e-4,3e-4
""",
}


def examples(command: str) -> str:
    r"""Return the examples of a command as the last part of its help.

    Lines after a ``\b`` stay as they are; others would be filled to the terminal's width.
    """
    lines = EXAMPLES[command].strip("\n").splitlines()
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
