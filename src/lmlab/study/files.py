"""Paths of the repository, and atomic file writes."""

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = ROOT / "workflow" / "schemas"
TEMPLATES = ROOT / "report" / "templates"
REFERENCES = ROOT / "report" / "references"


class NotWritten(OSError, ValueError):
    """A file that cannot be written (full disk, missing permission); the message is one line."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; it is not written"


def check_writable(files: Iterable[str]) -> None:
    """Raise a one-line error for the first folder in which a file could not be created."""
    parents = (Path(file).absolute().parents for file in files)
    for folder in dict.fromkeys(next(filter(os.path.lexists, above)) for above in parents):
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(
                f"{folder}: {error.strerror}; make it a folder that you may write to, or measure "
                "in another one (snakemake --directory)"
            ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file next to the target, then rename: an interrupt leaves the old file."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, str(path)) from error
