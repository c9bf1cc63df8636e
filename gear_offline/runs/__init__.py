"""Training runs.

The road of one: `train` (the door), `checks`, `resume`, `data`, `resolve`, `fit`, `loop`, `report`.

Between the steps the first rank's `writer` writes, has `evaluations` and tells `callbacks`, among
them `trackers`.  `directory` holds a run, `run` reads it, `evaluate` is the door of
`evaluation`.
"""
