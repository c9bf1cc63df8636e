"""Models: `base` is their interface, `policy` acts with any of them, `policy_folder` keeps one.

`decision_transformer` is the one on the Hugging Face class, same weights, same results; `decoupled`
is one without return tokens, `mlp` clones (BC, RvS, GCBC).  `loss` and `gaussian` are losses,
`encoders` are for frames, `multitask` for several tasks, `stacked` for several models in one pass.
"""
