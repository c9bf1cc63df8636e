"""Arrays in, arrays out: drawing, gathering, priorities, attention, AdamW; CUDA in ``cuda/``.

This room knows no dataset and no rank.  Every GPU kernel has a CPU reference that the tests
compare it with.
"""
