"""The chapter's words are those of the results, though its room may not import theirs."""

from __future__ import annotations

import pandas as pd
import pytest

from lmlab.experiments.trace_data import PHASES_OF_MODE
from lmlab.measure.trace import families
from lmlab.model.attention_cost import attention_parts
from lmlab.writeup import profile_words as words
from tests.model.test_attention_cost import SHAPE


def test_families_modes_and_parts_are_those_that_results_have() -> None:
    assert words.FAMILIES == families.FAMILIES
    assert words.MATMULS == families.MATMULS
    assert words.MODES == tuple(PHASES_OF_MODE) == tuple(words.MODE_NAMES) == tuple(words.RUN_NAMES)
    assert words.PARTS == tuple(attention_parts(SHAPE, element_bytes=4)) == tuple(words.PART_NAMES)


@pytest.mark.parametrize(("most", "prefix"), [(2e12, "T"), (1e9, "G"), (9e6, "M"), (5.0, "k")])
def test_the_prefix_is_that_of_the_largest_number(most: float, prefix: str) -> None:
    assert words.prefix(pd.Series([1.0, most])) == prefix


def test_a_formula_keeps_its_letters() -> None:
    assert words.part_title("scores") == "Scores QKᵀ"
