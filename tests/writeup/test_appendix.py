"""The appendix and the opening's counts, from documents of few words."""

from __future__ import annotations

from typing import Any

from lmlab.writeup.appendix import appendix, totals

INSIDE = "Of 8 cases, 5 are."
COMMIT = {"id": "0123abc", "dirty": False, "fingerprint": "feed", "results": 2}


def document(chapter: str = "collectives", **changes: Any) -> dict[str, Any]:
    """A chapter of which all is measured and nothing is to be told."""
    return {
        "chapter": chapter,
        "counts": {"points": 2, "ok": 2, "not_ok": 0, "missing": 0},
        "findings": {},
        "clocks": ["host"],
        "versions": [],
        "code": [COMMIT],
        "sizes": [],
        "settings": {},
        "flags": [],
        "not_ok": [],
        "not_measured": [],
        "other_settings": [],
        **changes,
    }


class TestOpening:
    def test_nothing_is_missing(self) -> None:
        told = totals([document(), document("memory", findings={"gap": ""})])
        assert told["gaps"] == "no point failed and none is missing"
        assert not told["cut"]

    def test_cases_without_a_number_are_told_beside_points_without_one(self) -> None:
        counts = {"points": 3, "ok": 2, "not_ok": 1, "missing": 0}
        cut = document(findings={"gap": "3 of 8 exchanges were not begun"}, counts=counts)
        told = totals([cut, document("memory")])
        assert told["gaps"] == "1 point ended without a number and 3 of 8 exchanges were not begun"
        assert told["cut"]


class TestFlags:
    def test_none(self) -> None:
        assert appendix([document()]).flags == ""

    def test_what_lies_inside_results_stands_below_the_table(self) -> None:
        raised = {"flag": "noisy", "paths": ["results/x/collectives/one.json"]}
        flagged = document(flags=[raised], findings={"noisy_inside": INSIDE})
        made = appendix([flagged]).flags
        assert made.startswith("| Flag ")
        assert made.endswith(f"|\n\n{INSIDE}")

    def test_what_lies_inside_results_is_told_where_no_result_raised_a_flag(self) -> None:
        made = appendix([document(findings={"noisy_inside": INSIDE})]).flags
        assert made == f"No result raised a flag.\n\n{INSIDE}"


class TestCode:
    def test_edits_that_were_not_committed_are_called_so(self) -> None:
        made = appendix([document(code=[{**COMMIT, "dirty": True}])]).code
        header, _, row = made.splitlines()
        assert header.split("|")[3].strip() == "Uncommitted edits when measured"
        assert row.split("|")[3].strip() == "yes"

    def test_a_topic_has_rows_of_its_own(self) -> None:
        topics = [{**COMMIT, "topic": "naive"}, {**COMMIT, "topic": "tiles"}]
        made = appendix([document("attention", code=topics), document()]).code
        firsts = [row.split("|")[1].strip() for row in made.splitlines()[2:]]
        assert firsts == ["`attention/naive`", "`attention/tiles`", "`collectives`"]


class TestSettings:
    def test_lists_of_pairs_are_written_as_sides(self) -> None:
        made = appendix([document(settings={"tiles": [[[32, 32], [32, 64]]]})]).settings
        assert "| 32 × 32, 32 × 64 |" in made

    def test_other_lists_and_mappings_as_people_write_them(self) -> None:
        lists = {"arms": [["naive", "compiled"], ["flash"]], "steps": [100, 10], "of": [{"a": 1}]}
        made = appendix([document(settings=lists)]).settings
        assert all(text in made for text in ("naive, compiled; flash", "100, 10", "a 1"))

    def test_settings_of_topics_are_not_merged(self) -> None:
        by_topic = {"naive": {"batch": [8]}, "tiles": {"batch": [1]}}
        topical = document("attention", settings={"batch": [8, 1]}, settings_by_topic=by_topic)
        made = appendix([topical, document(settings={"seed": [0]})]).settings
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in made.splitlines()[2:]]
        assert rows == [
            ["`attention/naive`", "`batch`", "8"],
            ["`attention/tiles`", "`batch`", "1"],
            ["`collectives`", "`seed`", "0"],
        ]
