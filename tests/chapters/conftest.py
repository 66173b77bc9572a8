"""Measuring in tests: one thread, and a lock that no real measurement holds."""

from tests.jobs.conftest import _alone_with_one_thread, cpu

__all__ = ["_alone_with_one_thread", "cpu"]
