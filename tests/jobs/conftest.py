"""Measuring in tests: one thread, and a lock that no real measurement holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmlab.jobs import run


@pytest.fixture(autouse=True)
def _alone_with_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two threads on a busy machine wait for each other at every operation."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)
    monkeypatch.setattr(run, "set_threads", lambda: torch.set_num_threads(1))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")
