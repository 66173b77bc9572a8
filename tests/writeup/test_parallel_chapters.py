"""Pages of the chapters of several ranks: what they share, from data that calls for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.writeup.build import document_of
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import save
from lmlab.writeup.registry import part
from tests.writeup import factory, synthetic
from tests.writeup.parallel_pages import CHAPTERS, KEY, WHO, changed, drop, finding


def nothing(chapter: str) -> Collected:
    return factory.collected(chapter, lambda point, device: None)


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_chapter_has_all_its_parts_and_no_warning(chapter: str, device: str) -> None:
    collected = synthetic.collected(chapter, device)
    document = document_of(collected)
    assert document["warnings"] == []
    assert "verdict" in document["tables"]
    assert all(sentence.endswith(".") for sentence in document["findings"].values())


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_without_results_says_so(chapter: str) -> None:
    document = document_of(nothing(chapter))
    assert "not measured" in document["findings"]["summary"]
    assert document["findings"]["ranks"].startswith("No job of several ranks was measured here.")
    assert document["tables"] == {} or list(document["tables"]) == ["published"]
    assert part("figures", chapter)(nothing(chapter)) == {}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_figure_can_be_drawn(chapter: str, tmp_path: Path) -> None:
    for name, drawing in part("figures", chapter)(synthetic.collected(chapter)).items():
        assert save(drawing, tmp_path, name), name


def test_ranks_come_from_the_process_group_and_shared_ones_are_called_so() -> None:
    said = finding("ranks", changed("data_parallel"))
    assert said.startswith(f"Measured on {WHO}.")
    assert "Ranks that share one GPU take turns on it" in said
    assert "2, 4, 6 and 8 ranks with a GPU each (needs 2 GPUs, 1 found, and so on)." in said
    nccl = {"backend": "nccl", "gpus": 2}
    own = finding("ranks", changed("data_parallel", lambda data: data["ranks"].update(nccl)))
    assert own.startswith("Measured on 2 ranks with a GPU each, NCCL.")
    assert "take turns" not in own


def test_with_several_jobs_every_sentence_names_its_ranks() -> None:
    collected = changed("fsdp")
    (row,) = [row for row in collected.rows if row.status == "ok"]
    twice = replace(collected, rows=[row, row])
    assert finding("waits", twice).startswith(f"{WHO}: ")
    assert not finding("waits", collected).startswith(WHO)


def choose(**how: Any) -> Any:
    return lambda data: data["choice"].update(how)


def test_which_size_was_taken_and_why_none_larger() -> None:
    said = finding("size", changed("data_parallel"))
    assert said.startswith("The size taken for these steps is small, the largest that fits")
    assert "Left: xl: its messages alone take about 4 s; large:" in said
    largest = finding("size", changed("data_parallel", choose(left_out=[])))
    assert "small, the largest of the study. A short trial all-reduce moves 2 GB/s" in largest
    slow = finding("size", changed("data_parallel", choose(over_limit=True, step_s=3.1)))
    assert "small, the smallest, although its step takes 3.1 s" in slow


VERDICTS = {
    "data_parallel": ("torch_ratio", {1.0: "a bucketed step", 0.5: "it is not so that"}),
    "sharded_optimizer": ("zero_ratio", {1.5: "the sharded", 0.5: "it is not so that"}),
    "fsdp": ("torch_ratio", {1.0: "FSDP's step is", 0.5: "it is not so that"}),
}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_verdict_of_every_kind(chapter: str) -> None:
    keyword, cases = VERDICTS[chapter]
    for ratio, words in cases.items():
        collected = changed(chapter, **{keyword: ratio})
        assert finding("verdict", collected).lower().startswith(words.lower())
        table = part("tables", chapter)(collected)["verdict"]
        assert table.rows[0][-1] == ("fail" if words.startswith("it is not") else "pass")


@pytest.mark.parametrize(
    ("chapter", "ratio", "faster"),
    [("data_parallel", 1.0, False), ("data_parallel", 1.5, True), ("fsdp", 1.0, False),
     ("fsdp", 1.5, True), ("sharded_optimizer", 1.5, True)],
)  # fmt: skip
def test_a_claim_is_of_not_being_slower_and_says_where_ours_is_faster(
    chapter: str, ratio: float, faster: bool
) -> None:
    collected = changed(chapter, **{VERDICTS[chapter][0]: ratio})
    said = finding("verdict", collected)
    assert "% slower than that of" in said or "takes no longer than that of" in said
    assert (": it is faster (" in said) == faster
    assert finding("summary", collected).endswith("holds: it is faster.") == faster


def times_of(data: dict[str, Any], chapter: str, name: str) -> list[list[float]]:
    """The samples that a chapter's verdict is taken from."""
    if chapter == "sharded_optimizer":
        times: list[list[float]] = data["time"]["arms"][name]["optimizer_ms"]
    else:
        times = data["arms"][name]["ranks_ms"]
    return times


@pytest.mark.parametrize(
    ("chapter", "name"),
    [("data_parallel", "torch_ddp"), ("sharded_optimizer", "torch_zero"),
     ("fsdp", "torch_fully_shard")],
)  # fmt: skip
def test_rounds_that_disagree_are_ambiguous(chapter: str, name: str) -> None:
    def scatter(data: dict[str, Any]) -> None:
        for times in times_of(data, chapter, name):
            times[::2] = [0.4 * time for time in times[::2]]
            times[1::2] = [2.5 * time for time in times[1::2]]

    collected = changed(chapter, scatter)
    assert "is AMBIGUOUS, the interval holds both answers" in finding("verdict", collected)
    assert "is AMBIGUOUS" in finding("summary", collected)
    assert part("tables", chapter)(collected)["verdict"].rows[0][-1] == "AMBIGUOUS"


def test_a_comparison_without_the_other_is_not_measured() -> None:
    both = finding("counts", changed("data_parallel"))
    assert both == "With buckets of 25 MB ours sends 20 messages in a step, PyTorch's 21."
    collected = changed("data_parallel", drop("arms", "torch_ddp"))
    assert "not both seen" in finding("counts", collected)
    assert "was not measured" in finding("verdict", collected)
    assert part("tables", "data_parallel")(collected)["verdict"].rows[0][-1] == "not measured"
    assert "not measured" in finding("summary", collected)


def test_no_more_can_be_hidden_than_is_computed() -> None:
    def little(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["trace"]["compute_ms"] = 64.0

    words = "On rank 0 FSDP could hide 21 % at most: its step computes for 64.0 ms, and messages"
    assert words in finding("overlap", changed("fsdp", little))

    def much(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["trace"]["compute_ms"] = 1e4

    assert "computes for" not in finding("overlap", changed("fsdp", much))


def test_bars_that_thinning_out_has_made_longer_are_pale_and_said_to_be() -> None:
    figures = part("figures", "data_parallel")
    caption = figures(changed("data_parallel"))[f"overlap_{KEY}"].caption
    assert "Pale" not in caption
    assert "those under way together are one bar" in caption

    def thinned(data: dict[str, Any]) -> None:
        data["arms"]["naive"]["trace"]["compute_ms"] = 50.0  # one bar of 100 ms is drawn

    assert (
        "Pale: bars more than 10 % longer"
        in figures(changed("data_parallel", thinned))[f"overlap_{KEY}"].caption
    )


def test_rounds_that_the_time_cap_cut_are_told() -> None:
    def cut(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["ranks_ms"] = [times[:3] for times in arm["ranks_ms"]]

    collected = changed("data_parallel", cut)
    assert "3 of 8 rounds, then the time was up)." in finding("verdict", collected)
    assert part("tables", "data_parallel")(collected)["verdict"].rows[0][-2] == "3 of 8"
    assert "8 rounds)." in finding("verdict", changed("data_parallel"))


def test_published_steps_take_the_slowest_rank() -> None:
    table = part("tables", "data_parallel")(changed("data_parallel"))["published"]
    assert ["2x RTX 4090", "medium", "naive", "506"] in [list(row) for row in table.rows]


def test_sizes_that_may_be_chosen_are_in_the_appendix() -> None:
    document = document_of(changed("fsdp"))
    assert [size["size"] for size in document["sizes"]] == ["xl", "large", "medium", "small"]
    assert document["settings"]["sizes"] == ["xl, large, medium, small"]
