"""An export under construction."""

from pathlib import Path

import pytest

from tests.measure.trace.export_builder import ExportBuilder


@pytest.fixture
def builder(tmp_path: Path) -> ExportBuilder:
    return ExportBuilder(tmp_path / "export.sqlite")
