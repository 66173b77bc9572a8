"""The rank processes that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.parallel.launcher import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need rank processes are slow: starting them takes longer than most tests."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run a function as the ranks of one group."""
    pool = RankPool()
    yield pool
    pool.stop()
