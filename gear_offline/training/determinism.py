"""The same bits each time: ``train.deterministic``.

Torch picks kernels for speed; some of them add up in an order that differs from run to run, and
libraries may time several and keep the fastest.  Here only kernels with one order are left.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

CUBLAS_WORKSPACE = ":4096:8"  # buffers of cuBLAS that let it keep one order of sums


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only while inside, if `wanted`.

    - ``torch.use_deterministic_algorithms``: an operation without a deterministic kernel raises.
    - cuBLAS with fixed workspaces, cuDNN without timing, no TF32 anywhere.
    - Attention by the flash kernel (whose backward torch then runs in one order) or plain
      matrix products; never by cuDNN or the memory-efficient kernel, which have no such order.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    cuda: Any = torch.backends.cuda  # its functions are not typed
    cudnn = torch.backends.cudnn
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, one_order, tf32 = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    efficient, by_cudnn = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    stack = ExitStack()
    try:
        # `GradientPass` asks for unused parameters for the sake of something else
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = False, True, False
        torch.set_float32_matmul_precision("highest")
        cuda.enable_mem_efficient_sdp(False)
        cuda.enable_cudnn_sdp(False)
        yield
    finally:
        stack.close()
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = benchmark, one_order, tf32
        torch.set_float32_matmul_precision(precision)
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_cudnn_sdp(by_cudnn)
