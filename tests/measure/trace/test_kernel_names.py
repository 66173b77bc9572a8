"""Families and short names that `kernel_names.csv` lists for real names of kernels."""

import csv
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.trace import kernel_names
from lmlab.measure.trace.kernel_names import RULES, family, is_optimizer, shorten
from lmlab.study.files import ROOT


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


EXAMPLES = rows_of(Path(__file__).with_name("kernel_names.csv"))


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: row["short_name"])
def test_a_name_has_the_listed_family_and_short_name(row: dict[str, str]) -> None:
    assert (family(row["name"]), shorten(row["name"])) == (row["family"], row["short_name"])


def test_every_rule_decides_an_example_and_gives_a_known_family() -> None:
    used = {
        next((rule for _, rule in RULES if re.search(rule, row["name"], re.IGNORECASE)), None)
        for row in EXAMPLES
    }
    assert {rule for _, rule in RULES} <= used
    assert {label for label, _ in RULES} | {"other"} == set(kernel_names.FAMILIES)


def test_kernels_published_for_other_gpus_are_all_known() -> None:
    names = {row["kernel"] for row in rows_of(ROOT / "report" / "references" / "kernels.csv")}
    assert names
    assert {name for name in names if family(name) == "other"} == set()


def test_the_optimizers_range_is_recognized_by_name() -> None:
    steps = ("optimizer", "optimizer step", "Optimizer.step#AdamW.step")
    assert all(is_optimizer(["step", name]) for name in steps)
    assert not is_optimizer(["step", "zero_grad", "Optimizer.zero_grad#AdamW.zero_grad"])


def test_a_truncated_name_keeps_the_number_at_its_end() -> None:
    long = "triton_per_fused__softmax__softmax_backward_data__to_copy_masked_fill_mul_view_"
    assert shorten(f"{long}10").endswith("…_view_10")
    assert shorten(f"{long}10") != shorten(f"{long}17")


@given(st.text(max_size=300))
def test_no_short_name_exceeds_the_limit(name: str) -> None:
    assert len(shorten(name)) <= kernel_names.MAX_LENGTH
