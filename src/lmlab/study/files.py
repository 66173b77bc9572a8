"""Where things lie in a checkout, and how a file is written so that nobody sees half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = ROOT / "workflow" / "schemas"
TEMPLATES = ROOT / "report" / "templates"
REFERENCES = ROOT / "report" / "references"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside the target, then rename: an interrupt leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
