"""Which episodes go into a GPU's memory: the hottest per byte, until the budget is spent.

Shape legend: E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.tables.device_memory import Memory, too_large
from gear_offline.tables.pinning import format_bytes

Placement = Literal["auto", "hbm", "host", "peer"]
HBM_SHARE = 0.6  # of the free GPU memory: model, optimiser and activations need the rest

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which episodes go into GPU memory.

    Attributes
    ----------
    in_hbm
        (E,) bool.
    hbm_bytes, host_bytes
        Bytes on either side.
    hbm_share
        Share of accesses, by weight, that GPU memory serves.
    """

    in_hbm: BoolArray
    hbm_bytes: int
    host_bytes: int
    hbm_share: float


def plan_episodes(sizes: Int64Array, weights: npt.NDArray[np.float64], budget_bytes: int) -> Plan:
    """Choose episodes by weight per byte, densest first, until nothing more fits the budget.

    Among equals earlier episodes come first, so that under a law that is uniform over steps the
    chosen ones are a prefix: one copy.  The weight that is left behind is at most the optimum's
    plus one episode's, as always with this rule.

    Parameters
    ----------
    sizes
        (E,) int64 bytes of each episode over all groups, at least 1.
    weights
        (E,) float64, how often an episode is drawn, in any unit.
    budget_bytes
        Bytes of GPU memory that may be used.
    """
    order = np.argsort(-(weights / sizes), kind="stable")
    chosen = np.zeros(len(sizes), dtype=bool)
    left = budget_bytes
    while len(order):
        order = order[sizes[order] <= left]
        fits = int(np.searchsorted(np.cumsum(sizes[order]), left, side="right"))
        chosen[order[:fits]] = True
        left -= int(sizes[order[:fits]].sum())
        order = order[fits:]
        if not fits:
            break
    total = float(weights.sum())
    hbm_bytes = int(sizes[chosen].sum())
    return Plan(
        in_hbm=chosen,
        hbm_bytes=hbm_bytes,
        host_bytes=int(sizes.sum()) - hbm_bytes,
        hbm_share=float(weights[chosen].sum()) / total if total else 0.0,
    )


def decide(
    sizes: Int64Array,
    weights: npt.NDArray[np.float64],
    *,
    placement: Placement,
    hbm_budget: int | None,
    spare_bytes: int,
    memory: Memory,
) -> tuple[Plan, str]:
    """Return the plan and the line that says why; `place_table` states the rule.

    `spare_bytes` of the budget are left for the alignment of groups.
    """
    total = int(sizes.sum())
    if placement == "peer":
        raise InputError(
            "PLACEMENT",
            "placement 'peer' needs several GPUs of one node",
            remedy="start one process a GPU with torchrun, or use 'auto'",
        )
    if placement == "host":
        return plan_episodes(sizes, weights, 0), (
            f"placement host: {format_bytes(total)} in pinned host memory, as asked for"
        )
    if placement == "hbm":
        budget = memory.free_bytes() if hbm_budget is None else hbm_budget
        source = "free on the device" if hbm_budget is None else "the given budget"
        if total + spare_bytes > budget:
            raise too_large(total + spare_bytes, budget, source)
        return plan_episodes(sizes, weights, total), (
            f"placement hbm: {format_bytes(total)} in GPU memory, as asked for"
        )
    if hbm_budget is None:
        free = memory.free_bytes()
        budget = int(free * HBM_SHARE)
        source = f"{HBM_SHARE:.0%} of {format_bytes(free)} free"
    else:
        budget, source = hbm_budget, "given"
    plan = plan_episodes(sizes, weights, budget - spare_bytes)
    limit = f"budget {format_bytes(budget)}, {source}"
    if not plan.host_bytes:
        return plan, f"placement auto: all {format_bytes(total)} in GPU memory ({limit})"
    return plan, (
        f"placement auto: {format_bytes(plan.hbm_bytes)} of {format_bytes(total)} in GPU memory "
        f"({limit}): {int(plan.in_hbm.sum()):,} of {len(sizes):,} episodes, "
        f"{plan.hbm_share:.0%} of accesses; the rest in pinned host memory"
    )


def episode_weights(given: npt.ArrayLike | None, lengths: Int64Array) -> npt.NDArray[np.float64]:
    weights = np.asarray(lengths if given is None else given, dtype=np.float64)
    if weights.shape != lengths.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError(
            "EPISODE_WEIGHT",
            f"episode weights of shape {weights.shape} are not usable",
            remedy=f"give {len(lengths)} finite numbers from 0, one an episode",
        )
    return weights
