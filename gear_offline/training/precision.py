"""The number format of a run's matrix products."""

from __future__ import annotations

import torch


def resolve_precision(precision: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return the autocast type (None: float32 throughout) and a line that says why.

    On CPUs ``auto`` is float32: without bfloat16 instructions autocast only adds work, and with
    them a recipe should still give the same weights as on the next machine.
    """
    if precision == "fp32":
        return None, "float32, as the recipe says"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "bfloat16 autocast, float32 weights"
        if precision == "bf16":
            return torch.bfloat16, "bfloat16 autocast as the recipe says, emulated by this GPU"
        return None, "float32: this GPU has no bfloat16"
    native = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    if precision == "bf16":
        remark = "" if native else "; this CPU has no instructions for it and will be slow"
        return torch.bfloat16, f"bfloat16 autocast as the recipe says{remark}"
    return None, "float32" + ("; train.precision=bf16 may be faster on this CPU" if native else "")
