"""Write requirements.lock with the hashes of every file that a supported platform may install.

    python .ci/lock.py < pins > requirements.lock

`pins` is the output of `pip freeze --all` in a fresh environment after `pip install .` and
`pip install --group dev .[cluster]`. Hashes are those of the package index.
"""

from __future__ import annotations

import html
import re
import sys
import urllib.request
from collections.abc import Iterator

INDEX = "https://pypi.org/simple/{}/"
LINK = re.compile(r'<a href="[^"]*/([^"/#]+)#sha256=([0-9a-f]{64})"')
# Wheels of the supported versions of Python on Linux and macOS, pure ones, and sources.
PYTHONS = re.compile(r"-(cp31[123]|cp3\d+-abi3|py3|py2\.py3)")
SYSTEMS = re.compile(r"linux|macosx|-any\.whl")
# From another index per kind of GPU, so there is no one set of hashes: requirements-torch.lock.
ELSEWHERE = ("torch", "triton", "nvidia-cu", "nvidia-nccl", "nvidia-nv", "lmlab")


def main() -> None:
    """Pins in, pins with hashes out."""
    print("# Pinned versions with hashes; see .ci/lock.py. Ranges are in pyproject.toml.")
    for line in sorted(sys.stdin.read().splitlines(), key=str.lower):
        pin = re.match(r"([\w.-]+)==([^\s;]+)", line)
        if pin and not pin[1].lower().startswith(ELSEWHERE):
            hashes = sorted(set(hashes_of(pin[1], pin[2])))
            print(f"{pin[1]}=={pin[2]} \\\n    " + " \\\n    ".join(hashes))


def hashes_of(name: str, version: str) -> Iterator[str]:
    """The hashes of a version's files, as pip's options."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(INDEX.format(normal)) as answer:
        files = LINK.findall(html.unescape(answer.read().decode()))
    stem = re.compile(rf"{normal.replace('-', '[-_.]+')}-{re.escape(version)}(-|\.tar|\.zip)", re.I)
    found = [(file, digest) for file, digest in files if stem.match(file)]
    if not found:
        raise SystemExit(f"{name} {version} is not in {INDEX.format(normal)}")
    for file, digest in found:
        if not file.endswith(".whl") or (PYTHONS.search(file) and SYSTEMS.search(file)):
            yield f"--hash=sha256:{digest}"


if __name__ == "__main__":
    main()
