"""Settings of the tests of costs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def warnings_logged() -> Iterator[list[logging.LogRecord]]:
    """What the cost modules warn of."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.message = record.getMessage()
            found.append(record)

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("lightning_remat.cost")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
