"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
