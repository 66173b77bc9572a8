"""Which modules are slow as a whole: they render many pages, or start many processes.

Single tests carry the mark themselves. `make test-fast` leaves both out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW = {
    "chapters/test_profile_page.py",
    "jobs/test_launch.py",
    "report/test_golden.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow module."""
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
