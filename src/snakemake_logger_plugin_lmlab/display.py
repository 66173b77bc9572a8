"""One changing line at a terminal, plain lines in a log file."""

from __future__ import annotations

import shutil
from typing import TextIO

CLEAR_LINE = "\r\033[K"


class Display:
    """Writes messages above a line that says what is running now."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty()
        self.current = ""

    def running(self, text: str) -> None:
        """What runs now: the changing line at a terminal, nothing in a log (its end is a line)."""
        if self.live:
            self.current = text[: shutil.get_terminal_size().columns - 1]
            self._write(f"{CLEAR_LINE}{self.current}")

    def message(self, text: str) -> None:
        """A line that stays."""
        self._write(f"{CLEAR_LINE}{text}\n{self.current}" if self.live else f"{text}\n")

    def end(self) -> None:
        """Take the changing line away."""
        if self.live and self.current:
            self.current = ""
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
