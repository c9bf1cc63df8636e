"""From tasks to scores: `play` the tasks, `rollout` their episodes in `environments`; `video`."""
