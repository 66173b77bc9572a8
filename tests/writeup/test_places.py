"""Points in words: ends of a range with their places, and no range where there is none."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.places import shares

ROWS = pd.DataFrame({"size": ["small", "xl"], "context": [128, 256], "share": [0.25, 0.5]})


def test_a_range_of_shares_names_both_its_places() -> None:
    assert shares(ROWS, "share") == "25 % (small at context 128) to 50 % (xl at context 256)"


def test_shares_that_print_alike_are_said_once() -> None:
    assert shares(ROWS.assign(share=[0.2501, 0.2502]), "share") == "25 %"
    assert shares(ROWS.head(1), "share", 3) == "25.0 %"
