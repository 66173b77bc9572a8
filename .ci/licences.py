"""Every package of this environment with its version and licence, as a CSV table."""

from __future__ import annotations

import csv
import sys
from importlib.metadata import PackageMetadata, distributions


def main() -> None:
    """One line per package, by name."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["package", "version", "licence"])
    found = {each.metadata["Name"]: each for each in distributions()}
    for name in sorted(found, key=str.lower):
        table.writerow([name, found[name].version, licence(found[name].metadata)])


def licence(metadata: PackageMetadata) -> str:
    """What the package states: an SPDX expression, else classifiers, else a line of text."""
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License :: ")
    ]
    text = (metadata.get("License") or "").strip().splitlines()
    return (
        metadata.get("License-Expression") or "; ".join(classifiers) or (text or ["not stated"])[0]
    )


if __name__ == "__main__":
    main()
