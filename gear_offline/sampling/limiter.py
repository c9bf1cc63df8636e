"""When episodes may come and segments may be drawn: Reverb's rate limiters, by a few counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gear_offline.config.sections import DataSettings, LimiterSettings
from gear_offline.core.text import count_text


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a limiter looks at."""

    size: int  # episodes that are there
    inserted: int  # episodes, so far
    drawn: int  # segments, so far
    coming: int  # segments that will be drawn until the next look
    used: int  # segments, so far, of the episodes that are there

    def after(self, inserts: int) -> Counts:
        """Return the counts as if so many episodes had come."""
        return replace(self, size=self.size + inserts, inserted=self.inserted + inserts)


class Limiter:
    """The limits of data that had `first` episodes before any was admitted."""

    def __init__(self, data: DataSettings, first: int) -> None:
        rule = data.limiter or LimiterSettings(min_size=1)
        self._min_size, self._ratio = rule.min_size or max(1, first), rule.samples_per_insert or 1.0
        self._least, self._most = rule.allowed(self._min_size)  # inserts * ratio - draws
        self._max_times = data.max_times_sampled

    def may_insert(self, counts: Counts, episodes: int) -> bool:
        """Return whether so many more episodes may come."""
        after = counts.after(episodes)
        error = after.inserted * self._ratio - after.drawn
        return after.size <= self._min_size or error <= self._most

    def missing(self, counts: Counts) -> str:
        """Return what the draws that are coming wait for: "3 episodes (why)", or nothing."""
        if counts.size < self._min_size:
            why = f"min_size {self._min_size}, {counts.size} are there"
            return f"{count_text(self._min_size - counts.size, 'episode')} ({why})"
        draws = counts.drawn + counts.coming + self._least - counts.inserted * self._ratio
        if draws > 0:
            why = f"samples_per_insert {self._ratio:g}"
            return f"{count_text(math.ceil(draws / self._ratio), 'episode')} ({why})"
        most = self._max_times
        if most is not None and (draws := counts.coming + counts.used - most * counts.size) > 0:
            return f"{count_text(math.ceil(draws / most), 'episode')} (max_times_sampled {most})"
        return ""
