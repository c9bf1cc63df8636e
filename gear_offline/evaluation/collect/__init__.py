"""Make real data: play policies of known quality in Gymnasium and record them in D4RL's layout."""
