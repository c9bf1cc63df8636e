"""What training keeps in GPU memory, by formula: enough to choose between DDP and FSDP.

Shape legend: n tokens of a micro-batch, L blocks, h hidden size.
"""

from __future__ import annotations

STATE_BYTES = 16  # a parameter: weight, gradient, two moments, float32
SHADOW_BYTES = 2  # a parameter: its bfloat16 copy of a step
FULL_BYTES = 4  # a parameter in float32
KEPT_BYTES = 38  # a token, block and unit of width: what compiled blocks keep for the backward pass
KEPT_RECOMPUTED = 4  # where blocks are computed again: their inputs
CONTEXT_BYTES = 3 << 29  # CUDA itself, libraries, workspaces
USABLE = 0.9  # of free memory: allocators lose some in between


def state_bytes(parameters: int, *, half: bool) -> int:
    """Return the bytes of weights, gradients and moments."""
    return parameters * (STATE_BYTES + (SHADOW_BYTES if half else 0))


def shard_bytes(parameters: int, *, ranks: int, half: bool, gathered: bool) -> int:
    """Return the bytes of a rank's shards of weights, gradients and moments.

    Parameters
    ----------
    gathered
        Between a forward and its backward pass a rank keeps all blocks' weights too.
    """
    whole = parameters * (SHADOW_BYTES if half else FULL_BYTES) if gathered else 0
    return -(-parameters * STATE_BYTES // ranks) + whole


def kept_bytes(*, tokens: int, layers: int, width: int, half: bool, recompute: bool) -> int:
    """Return the bytes that a micro-batch keeps from its forward to its backward pass."""
    each = KEPT_BYTES * (1 if half else 2)
    if not recompute:
        return tokens * width * layers * each
    return tokens * width * (layers * KEPT_RECOMPUTED + each)  # and one block in full
