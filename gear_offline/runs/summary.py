"""What a complete run says of itself in ``summary.json``."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from gear_offline.runs.leading_run import LeadingRun


def summary_of(run: LeadingRun) -> dict[str, Any]:
    """Return the summary of a run whose steps are done, JSON-able but for NaN and infinities."""
    learner, evaluations = run.learner, run.metrics.evaluations
    spec, returns = run.dataset.spec, run.dataset.returns[np.isfinite(run.dataset.returns)]
    return {
        "recipe": run.recipe.name,
        "seed": run.recipe.seed,
        "steps": learner.step,
        "seconds": round(run.seconds, 3),
        "steps_per_second": run.steps_per_second,
        "data_wait_share": learner.data_wait_share,
        "save_wait_share": run.save_wait_share,
        "throughput": learner.meter.summary(),
        "evaluation": run.evaluations.summary(),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "device": str(learner.device),
        "precision": learner.precision_reason,
        "deterministic": run.settings.deterministic,
        "threads": torch.get_num_threads(),
        "data": {
            "path": run.recipe.data.path,
            "episodes": spec.episodes,
            "steps": spec.steps,
            "return_mean": float(returns.mean()) if returns.size else None,
            "return_max": float(returns.max()) if returns.size else None,
        },
        "evaluation_last": evaluations[-1] if evaluations else None,
        "evaluation_best": run.metrics.best,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
    }
