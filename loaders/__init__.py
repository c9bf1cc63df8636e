"""From a table to batches: `GearLoader`, `Batch`, the static batch of a captured step.

`loader` is the public door, `options` what may be asked, `rows` where rows lie, `segments` which
of them a rank has and rows of other nodes, `feedback` brings losses back to samplers that learn.
"""
