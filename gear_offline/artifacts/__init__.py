"""The files of a run.

keep     `checkpoint`, whole or not there; `sharded`: what ranks hold in pieces.
read     `json_lines`, `records`: metrics and evaluations; `trained`: a model that acts.
give     `export`, `onnx`: a policy as one file.
"""
