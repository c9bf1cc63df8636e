"""Compare sampling strategies by their draws and by training: `strategies.compare_strategies`.

`sampling` names what is compared and counts draws, `significance` compares trained ones,
`page` has the tables and the page; `audit`, `blame` and `spikes` look at data and the loss.
"""
