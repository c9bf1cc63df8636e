"""What sampling strategies draw and what is learnt from it: `strategies.compare_strategies`.

`sampling` names what is compared and counts draws, `significance` compares trained ones,
`page` has the tables and the page; `audit` and `blame` look at data and at a spike.
"""
