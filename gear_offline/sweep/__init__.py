"""Many runs: `sweep.sweep` trains the trials of a grid, on a CPU in worker processes, on a GPU
together.  `trials` has the grid and the directory, `results` the table over seeds.
"""
