"""Training runs.  The road of one: `train` (the door), `checks`, `prepare`, `loop`, `report`.

Between the steps the first rank's `writer` writes, has `evaluations` and tells `callbacks`, among
them `trackers`.  `directory` says what may change; `run` reads a run, `evaluate` plays it.
"""
