"""The names of arrays in signatures, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]
UInt8Array = npt.NDArray[np.uint8]
