"""The rank processes that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.parallel.launcher import LARGEST_WORLD, RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need rank processes are slow: starting those takes longer than most tests."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def get_ready() -> None:
    """Import what programs compare with; torch compiles optimizers for it, which takes seconds."""
    import torch.distributed.fsdp
    import torch.distributed.optim  # noqa: F401


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Three processes that run a function as ranks of one group."""
    pool = RankPool()
    pool.run(get_ready, LARGEST_WORLD)
    yield pool
    pool.stop()
