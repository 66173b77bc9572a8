"""An export under construction."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.measure.trace.export_builder import ExportBuilder


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[ExportBuilder]:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        yield builder
