"""From a table to batches: `GearLoader` (`loader`) and `Batch`.  The road of one batch:

draw    (seed, step) -> segments, on the host by `segments`, or by the GPU in the gather's kernel.
locate  each episode's address, set when `rows` opens a tier; `segments` fetches from other nodes.
gather  segments -> windows, by `CpuGather` or `GpuGather`: `rows`, or `static_batch` if captured.
batch   windows -> `Batch`, views: `batch`.  `feedback` brings losses back to samplers that learn.
"""
