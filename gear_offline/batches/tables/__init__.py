"""Rows in any memory: `fields` chooses their columns, `joint` their datasets.

memory  `table` plans and fills groups of columns, `returns` sums returns-to-go; `shared`: by whom.
GPU     `placement` gives each episode a tier and an address, `device` has the calls for it.
disk    `disk` keeps windows in slots, `read_ahead` says which come next, `window_reader` reads.
"""
