"""What the tests of sweeps share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Files need not outlive this computer: what a killed process has written is there without that."""

    def connected(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", connected)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", connected)
