"""What sampling strategies draw and what is learnt from it: `strategies.compare_strategies`.

`candidates` names what is compared, `sampling` counts draws, `compare` has the statistics of
trained strategies, `page` the tables and the page.
"""
