"""What sampling strategies draw and what is learnt from it: `strategies.compare_strategies`.

`sampling` names what is compared and counts draws, `compare` has the statistics of trained
strategies, `page` the tables and the page.
"""
