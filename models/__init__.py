"""The Decision Transformer on the Hugging Face class: same weights, same results.

`decision_transformer` is the model, `loss` its loss, `policy` acts with it; `encoders` are for
frames, `multitask` for several tasks, `stacked` for several models in one pass.
"""
