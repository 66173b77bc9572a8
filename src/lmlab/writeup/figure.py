"""A figure of the page: drawn once, kept as PNG (which the page shows) and SVG (which it opens)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lmlab.study.files import write_atomically
from lmlab.writeup.style import house_style, separate_thousands

# A date or a version in a file would change its bytes without a change of the picture.
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}


@dataclass(frozen=True)
class Drawing:
    """What a figure shows, in words and as code; `draw` is None where nothing was measured."""

    alt: str
    """For a reader who cannot see it."""
    caption: str
    draw: Callable[[], Figure] | None


def save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    """Draw in the house style and write both formats; nothing to draw writes nothing."""
    if drawing.draw is None:
        return []
    with house_style():
        figure = drawing.draw()
        separate_thousands(figure)
        # Laid out once for both formats: that is half of the drawing time.
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
            figure.set_layout_engine("none")
        try:
            return [_write(figure, folder / f"{name}.{kind}", kind) for kind in METADATA]
        finally:
            plt.close(figure)


def _write(figure: Figure, path: Path, kind: str) -> Path:
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, metadata=METADATA[kind])
    write_atomically(path, buffer.getvalue())
    return path
