"""What a recipe needs on a cluster, and how fast it would be there: sums of measured rates.

`hardware` holds the rates of a machine, `workload` what is known of the data, `compute` what a
step costs a GPU, and `plan` puts them together.
"""
