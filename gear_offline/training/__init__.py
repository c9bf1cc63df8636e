"""One step and its state.

step     `learner`: `gradients`, `optimizer`; as one CUDA graph `graph`, with others' in a `stack`.
model    `model` builds it, `parallel` shares it over ranks, `seeding` decides its bits.
measure  `window` has losses and times since the last report, `cost` counts FLOPs and bytes.
keep     `saving` copies the state beside the steps.
"""
