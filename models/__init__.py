"""Models: `base` is their interface, `policy` acts with any of them, `policy_folder` keeps one.

`decision_transformer` has the weights of Hugging Face's class, which `hugging_face` alone imports;
`decoupled` is one without return tokens, `mlp` clones (BC, RvS, GCBC).  `loss` and `gaussian` are
losses, `encoders` are for frames, `multitask` for several tasks, `stacked` for several models.
"""
