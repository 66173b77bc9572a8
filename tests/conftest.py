"""Which modules are slow as a whole: they render many pages, or start many processes.

Single tests carry the mark themselves. `make test-fast` leaves both out.
"""

import gc
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW = {
    "chapters/test_profile_page.py",
    "jobs/test_launch.py",
    "report/test_golden.py",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow module."""
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep modules out of collections, which measuring asks for at every turn."""
    gc.collect()
    gc.freeze()
