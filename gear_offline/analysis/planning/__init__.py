"""Estimates of a recipe's memory and speed on a cluster, from measured rates.

`hardware` holds the rates of a machine, `workload` the facts of the data, `compute` the cost of a
step on a GPU, and `plan` puts them together.
"""
