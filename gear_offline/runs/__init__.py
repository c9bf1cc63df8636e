"""Training runs: what is prepared, the loop, what a run directory holds, its report."""
