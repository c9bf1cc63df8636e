"""The text of ``config.json``, without warnings about values that are not in it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gear_offline.models.decision_transformer import DecisionTransformer

LOGGER = "transformers.configuration_utils"


def config_text(model: DecisionTransformer) -> str:
    """Return the model's configuration as ``save_pretrained`` writes it, JSON."""
    config = copy.deepcopy(model.config)
    config.architectures = ["DecisionTransformerModel"]  # the released class reads it too
    with _without_remarks_on_defaults():
        return str(config.to_json_string())


@contextmanager
def _without_remarks_on_defaults() -> Iterator[None]:
    """Drop what transformers 5.17 says of its own default token ids.

    To leave defaults out of the text it builds the default configuration, and warns of it: 50256
    is no token of a vocabulary of one.  Ours are 0.
    """

    def wanted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "token_id must be" not in text or "got 50256" not in text

    logger = logging.getLogger(LOGGER)
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
