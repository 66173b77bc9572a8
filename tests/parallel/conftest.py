"""The rank processes that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.parallel.launcher import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Three processes that run a function as ranks of one group."""
    pool = RankPool()
    yield pool
    pool.stop()
