"""One step and its state, and what stays of them.

step     `learner`: `gradients`, `optimizer`; as one CUDA graph `graph`, with others' in a `stack`.
model    `model` builds it, `parallel` shares it over ranks, `seeding` decides its bits.
measure  `window` has losses and times since the last report, `cost` counts FLOPs and bytes.
keep     `saving` copies beside the steps; `checkpoint` makes it whole, `sharded` what is spread.
read     `json_lines`, `records`: of a run; `trained`: what acts; `export`, `onnx`: as a file.
"""
