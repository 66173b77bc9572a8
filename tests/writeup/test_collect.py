"""The study's points decide what the page is about; what is not there is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmlab.study.chapters import READS, points_of
from lmlab.study.files import REFERENCES
from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import collect, pattern_of, sources_of
from lmlab.writeup.provenance import provenance, tally
from tests.writeup import factory, synthetic

STUDY = factory.study("cuda", sizes=["small"], contexts=[128, 256], precisions=["fp32"])
POINTS = points_of(STUDY, "end_to_end")


def read_back(root: Path) -> object:
    return collect(
        STUDY, "end_to_end", machine="nvidia-h200", device="cuda", results=root / "results",
        references=REFERENCES,
    )  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Results of all points but the last."""
    for point in POINTS[:-1]:
        synthetic.end_to_end(point).write(point.path(tmp_path / "results", "nvidia-h200"))
    return tmp_path


def test_a_point_without_a_file_is_missing(root: Path) -> None:
    rows = read_back(root).rows
    assert [row.status for row in rows] == ["ok"] * (len(POINTS) - 1) + ["missing"]
    assert rows[-1].path == POINTS[-1].path(Path("results"), "nvidia-h200").as_posix()


def test_a_broken_file_is_unreadable_and_says_why(root: Path) -> None:
    POINTS[0].path(root / "results", "nvidia-h200").write_text('{"half": ')
    row = read_back(root).rows[0]
    assert row.status == "unreadable"
    assert "not a readable JSON file" in row.reason


def test_a_result_of_another_point_is_not_taken(root: Path) -> None:
    here = POINTS[0].path(root / "results", "nvidia-h200")
    here.write_bytes(POINTS[1].path(root / "results", "nvidia-h200").read_bytes())
    assert read_back(root).rows[0].reason == "holds the result of another point"


def test_a_result_of_another_machine_is_not_taken(root: Path) -> None:
    machine = {"id": "nvidia-b200", "device": "cuda", "name": "NVIDIA B200"}
    elsewhere = replace(synthetic.end_to_end(POINTS[0]), machine=machine)
    elsewhere.write(POINTS[0].path(root / "results", "nvidia-h200"))
    assert read_back(root).rows[0].reason == "measured on nvidia-b200, not on nvidia-h200"


def test_a_result_measured_under_other_settings_is_named(root: Path) -> None:
    result = synthetic.end_to_end(POINTS[0])
    changed = factory.result(
        POINTS[0],
        settings={**POINTS[0].settings, "steps": 3},
        measurements=result.measurements,
        data=result.data,
    )
    changed.write(POINTS[0].path(root / "results", "nvidia-h200"))
    told = provenance(read_back(root))["other_settings"]
    assert [other["settings"] for other in told] == [["steps"]]


def test_many_files_are_told_as_one_pattern() -> None:
    paths = [point.path(Path("results"), "m").as_posix() for point in POINTS if len(POINTS) > 1]
    pattern = pattern_of(path for path in paths if "start~warm" in path)
    assert pattern == (
        "results/m/end_to_end/size~small/context~*/batch~4/precision~fp32/mode~*/"
        "attention~naive/warmup~5/start~warm.json"
    )
    assert pattern_of(["results/m/a/x~1.json", "results/m/a/x~1/y~2.json"]) == "results/m/a/**"


def test_a_table_says_how_many_of_its_files_are_there(root: Path) -> None:
    (source,) = sources_of(read_back(root).rows)
    assert source.endswith(f"({len(POINTS) - 1} of {len(POINTS)} files)")


def test_provenance_counts_what_results_carry(root: Path) -> None:
    told = provenance(read_back(root))
    assert told["counts"] == {
        "points": len(POINTS), "ok": len(POINTS) - 1, "not_ok": 0, "missing": 1,
    }  # fmt: skip
    assert told["code"] == [
        {"id": factory.COMMIT, "dirty": False, "fingerprint": "0123456789abcdef",
         "results": len(POINTS) - 1}
    ]  # fmt: skip
    assert told["settings"]["steps"] == [10]


def test_tally_puts_the_most_frequent_first() -> None:
    assert tally([{"a": 1}, {"a": 2}, {"a": 2}]) == [{"a": 2, "results": 2}, {"a": 1, "results": 1}]


def test_a_caption_is_read_off_the_results() -> None:
    results = [synthetic.end_to_end(point) for point in POINTS if point.parameters["warmup"] == 5]
    warm = [result for result in results if result.parameters["start"] == "warm"]
    assert describe(warm) == (
        "NVIDIA H200, TF32 off, batch 4, naive attention, 5 warm-ups, warm start, "
        "synchronised host clock, n = 10."
    )


def test_a_caption_says_where_its_rows_differ() -> None:
    def with_tf32(tf32: bool, steps: int) -> object:
        settings = {**POINTS[0].settings, "steps": steps}
        point = type(POINTS[0])("end_to_end", POINTS[0].parameters, settings)
        return factory.step(point, forward=1.0, data={"tf32": tf32})

    text = describe([with_tf32(False, 10), with_tf32(False, 4), with_tf32(True, 10)])
    assert "TF32 differs between rows: TF32 off (2) and TF32 on (1)" in text
    assert "n differs: 4 to 10" in text


def test_a_cpu_is_labelled_as_one_with_its_threads() -> None:
    study = factory.study("cpu")
    results = [synthetic.end_to_end(p, "cpu") for p in points_of(study, "end_to_end")[:2]]
    assert describe(results).startswith("Test Processor 2 @ 2.0 GHz (CPU), 2 threads, batch 4")
    assert "TF32" not in describe(results)


def test_a_caption_of_nothing_says_so() -> None:
    assert describe([]) == "Nothing measured."


def test_a_caption_tells_why_points_are_unsupported() -> None:
    reasons = ["no bf16 here", "no bf16 here", "too large"]
    results = [
        factory.failed(point, "unsupported", reason)
        for point, reason in zip(POINTS, reasons, strict=False)
    ]
    assert with_reasons("Said.", results) == (
        "Said. Unsupported: no bf16 here (2 points); too large (1 point)."
    )
    assert with_reasons("Said.", [synthetic.end_to_end(POINTS[0])]) == "Said."


def test_a_chapter_sees_the_results_of_those_it_refers_to(root: Path) -> None:
    profiles = collect(
        STUDY, "profile", machine="nvidia-h200", device="cuda", results=root / "results",
        references=REFERENCES,
    )  # fmt: skip
    assert set(profiles.beside) == set(READS["profile"]) == {"end_to_end"}
    assert len(profiles.beside["end_to_end"]) == len(POINTS)
    assert read_back(root).beside == {}
