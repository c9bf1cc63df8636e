"""From a table to batches: `GearLoader`, `Batch`, the static batch of a captured step.

`loader` is the public door, `options` what may be asked, `open_rows` where rows lie, `sharded`
rows of other nodes, `feedback` brings losses back to samplers that learn from them.
"""
