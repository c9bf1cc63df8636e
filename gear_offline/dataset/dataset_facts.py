"""What a dataset's manifest says of it, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gear_offline.dataset.manifest import Manifest
    from gear_offline.dataset.schema import TableSpec
    from gear_offline.dataset.scores import ReferenceScores
    from gear_offline.dataset.statistics import ColumnStatistics


class ManifestFacts:
    """Facts of a dataset that has a `manifest`."""

    manifest: Manifest

    @property
    def spec(self) -> TableSpec:
        """Columns, steps and episodes."""
        return self.manifest.spec

    @property
    def statistics(self) -> Mapping[str, ColumnStatistics]:
        """Per column: count, mean, std, min and max over all steps."""
        return self.manifest.statistics

    @property
    def environment_id(self) -> str | None:
        """Gymnasium id of the environment, ``None`` when unknown."""
        return self.manifest.environment_id

    @property
    def reference_scores(self) -> ReferenceScores | None:
        """Scores of a random and an expert policy, ``None`` when unknown."""
        from gear_offline.dataset.scores import ReferenceScores

        found = self.manifest.reference_scores
        return None if found is None else ReferenceScores(**found)
