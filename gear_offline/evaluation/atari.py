"""Atari environments: Gymnasium's own preprocessing around ``ale-py``, single frames out.

An id ``ALE/...`` gives 84 x 84 grey uint8 frames: the usual preprocessing (Machado et al. 2018),
made of Gymnasium's wrappers.  Stacks are not made here: datasets hold single frames, loader and
policy stack them.
"""

from __future__ import annotations

from typing import Any, Final

import gymnasium

from gear_offline.errors import UnavailableError

FRAME_SKIP: Final = 4  # emulator frames a step; the last two are merged by their maximum
SCREEN_SIZE: Final = 84
FRAMES_PER_EPISODE: Final = 108_000  # half an hour of play, ALE's own limit
REMEDY: Final = "pip install 'gear-offline[atari]'"


def is_atari(environment_id: str) -> bool:
    """Return whether `environment_id` names a game of the Arcade Learning Environment."""
    return environment_id.startswith("ALE/")


def register_atari() -> None:
    """Make the games known to Gymnasium.

    Raises
    ------
    UnavailableError
        ``ENVIRONMENT_PACKAGE`` when ``ale-py`` is not installed.
    """
    try:
        import ale_py
    except ImportError as error:
        raise UnavailableError(
            "ENVIRONMENT_PACKAGE",
            f"Atari games need ale-py: {error}",
            remedy=REMEDY,
        ) from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for each environment
    gymnasium.register_envs(ale_py)


def make_atari(environment_id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make a game with the standard preprocessing, one (84, 84) uint8 frame a step.

    Up to 30 no-ops after a reset, 4 emulator frames a step with the maximum of the last two, grey,
    84 x 84; sticky actions as the id says (``-v5``: 0.25); rewards are the game's points, not
    clipped.  An episode is a whole game, not one life (``terminal_on_life_loss=False``, as
    Gymnasium and Dopamine have it), and ends after 27,000 steps.

    Raises
    ------
    gymnasium.error.Error
        As `gymnasium.make`; ``DependencyNotInstalled`` without OpenCV.
    UnavailableError
        ``ENVIRONMENT_PACKAGE``
    """
    register_atari()
    game = gymnasium.make(environment_id, frameskip=1, **options)
    frames = gymnasium.wrappers.AtariPreprocessing(
        game,
        noop_max=30,
        frame_skip=FRAME_SKIP,
        screen_size=SCREEN_SIZE,
        terminal_on_life_loss=False,
        grayscale_obs=True,
        scale_obs=False,
    )
    return gymnasium.wrappers.TimeLimit(frames, FRAMES_PER_EPISODE // FRAME_SKIP)
