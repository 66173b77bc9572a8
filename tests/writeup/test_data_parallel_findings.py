"""Data parallel: every sentence, from data that calls for it."""

from __future__ import annotations

from typing import Any

from lmlab.writeup.registry import part
from tests.writeup.parallel_pages import changed, drop, finding


def test_the_fastest_and_the_slowest_variant() -> None:
    said = finding("speed", changed("data_parallel"))
    assert "is fastest with a median step of" in said
    assert "slowest with" in said
    failed = finding("speed", changed("data_parallel", drop("arms", "naive")))
    assert "naive has no time: gradients are off by 0.1." in failed

    def same(data: dict[str, Any]) -> None:
        wobble = [[100.0, 101, 99, 100, 102, 100, 98, 100]] * 2
        for index, arm in enumerate(data["arms"].values()):
            arm["ranks_ms"] = [[*row[index % 8 :], *row[: index % 8]] for row in wobble]

    assert "rounds do not tell the fastest" in finding("speed", changed("data_parallel", same))

    def only_one(data: dict[str, Any]) -> None:
        for name in list(data["arms"]):
            if name not in ("alone", "flat"):
                drop("arms", name)(data)

    few = changed("data_parallel", only_one)
    assert finding("speed", few).startswith("Fewer than two variants have times.")
    assert "too few variants" in finding("buckets", few).lower()
    assert "naive and flat were not both measured" in finding("messages", few).lower()


def test_the_cost_of_many_messages() -> None:
    said = finding("messages", changed("data_parallel"))
    assert "in 111 messages instead of 1" in said
    assert "makes a step 15 % longer (1.146 times, 95 % interval" in said

    def alike(data: dict[str, Any]) -> None:
        data["arms"]["naive"]["ranks_ms"] = data["arms"]["flat"]["ranks_ms"]

    assert "no difference that these rounds show (1.000 times, 95 % interval 1.000 to" in finding(
        "messages", changed("data_parallel", alike)
    )

    def quicker(data: dict[str, Any]) -> None:
        flat = data["arms"]["flat"]["ranks_ms"]
        data["arms"]["naive"]["ranks_ms"] = [[0.5 * time for time in times] for times in flat]

    assert "% shorter (0.500 times" in finding("messages", changed("data_parallel", quicker))

    def one_round(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["ranks_ms"] = [times[:1] for times in arm["ranks_ms"]]

    few = finding("messages", changed("data_parallel", one_round))
    assert few == "Too few rounds were taken to compare naive with flat."


def paced(data: dict[str, Any], name: str, ratio: float, of: str) -> None:
    """Let a variant take `ratio` times as long as another, with rounds in another order."""
    times = [[*one[1:], one[0]] for one in data["arms"][of]["ranks_ms"]]
    data["arms"][name]["ranks_ms"] = [[ratio * time for time in one] for one in times]


def test_variants_that_rounds_do_not_tell_from_the_fastest() -> None:
    said = finding("speed", changed("data_parallel"))
    assert said.startswith("PyTorch DDP, 25 MB is fastest")
    assert "Rounds do not tell the fastest from bucketed 25 MB. Intervals are of one pair" in said
    assert "do not tell" not in finding("speed", changed("data_parallel", torch_ratio=0.5))


def test_rounds_that_were_cut_are_told_where_the_fastest_is_named() -> None:
    def cut(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["ranks_ms"] = [times[:3] for times in arm["ranks_ms"]]

    assert "3 of 8 rounds, then the time was up." in finding("speed", changed("data_parallel", cut))


def test_the_same_messages_during_backward_instead_of_after_it() -> None:
    said = finding("during", changed("data_parallel"))
    assert "same 111 messages during backward, several at once, instead of one by one after" in said
    assert "it makes a step" in said
    assert "% shorter (" in said
    assert "confirm" not in said

    no_gain = finding(
        "during", changed("data_parallel", lambda data: paced(data, "overlapped", 1.0, "naive"))
    )
    assert "makes no difference that these rounds show (1.000 times" in no_gain
    assert "confirm" not in no_gain, "buckets are faster than flat all the same"

    loss = finding(
        "during", changed("data_parallel", lambda data: paced(data, "overlapped", 1.2, "naive"))
    )
    assert "makes a step 20 % longer" in loss
    neither = drop("arms", "naive"), drop("arms", "flat")

    def only_during(data: dict[str, Any]) -> None:
        for change in neither:
            change(data)

    alone = finding("during", changed("data_parallel", only_during))
    assert "no variant that talks during backward was measured beside one" in alone.lower()


def test_what_talks_during_backward_beside_one_message_after_it() -> None:
    def some(data: dict[str, Any]) -> None:
        for name in data["arms"]:
            if name.startswith(("overlapped", "bucketed_")):
                paced(data, name, 0.8, "flat")
        paced(data, "bucketed_1", 1.0, "flat")
        paced(data, "bucketed_1000", 1.3, "flat")

    said = finding("during", changed("data_parallel", some))
    assert "Beside flat (1 message after backward), overlapped, bucketed 10 MB" in said
    assert "are faster (0.800 times its step); bucketed 1,000 MB is slower (1.30 times" in said
    assert "rounds do not tell bucketed 1 MB from it." in said

    def none(data: dict[str, Any]) -> None:
        for name in data["arms"]:
            if name.startswith(("overlapped", "bucketed_")):
                paced(data, name, 1.0, "flat")
        paced(data, "naive", 1.0, "flat")

    assert finding("during", changed("data_parallel", none)).endswith(
        "What the profiler shows as hidden below, the clock does not confirm."
    )


def hides(data: dict[str, Any], name: str, *shares: float) -> None:
    """Let ranks hide these shares of a variant's messages."""
    data["arms"][name]["trace"].update(
        overlapped_share=shares[0], overlapped_share_by_rank=[*shares, *shares][:2]
    )


def test_what_overlap_hides() -> None:
    said = finding("overlap", changed("data_parallel"))
    assert "naive and flat, which talk after backward, hide nothing" in said.lower()
    assert "those that talk during it hide 25 % of the time of their messages;" in said
    assert "PyTorch DDP, 25 MB hides 25 %" in said

    def leaky(data: dict[str, Any]) -> None:
        hides(data, "flat", 0.3)
        hides(data, "bucketed_10", 0.6)

    unlike = finding("overlap", changed("data_parallel", leaky))
    assert "which talk after backward, show 0 % to 30 %;" in unlike
    assert "is waiting, not travel: the host is ahead of the GPU" in unlike
    nccl = {"backend": "nccl", "gpus": 2}

    def leaky_kernels(data: dict[str, Any]) -> None:
        leaky(data)
        data["ranks"].update(nccl)

    key = "overlap_shared_gpu_2"
    of_nccl = part("findings", "data_parallel")(changed("data_parallel", leaky_kernels))[key]
    assert "hide at most 30 %" in of_nccl
    assert "waiting" not in of_nccl
    assert "hide 25 % to 60 % of the time of their messages (most: bucketed, 10 MB)" in unlike

    def blind(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["trace"].update(overlapped_share=None, seen_as=None)
            arm["trace"]["overlapped_share_by_rank"] = [None, None]

    for chapter in ("data_parallel", "fsdp"):
        assert "saw no message" in finding("overlap", changed(chapter, blind))


def test_ranks_that_hide_different_shares() -> None:
    def unlike(data: dict[str, Any]) -> None:
        hides(data, "bucketed_10", 0.40, 0.30)
        hides(data, "bucketed_25", 0.30, 0.50)
        hides(data, "torch_ddp", 0.35, 0.45)

    said = finding("overlap", changed("data_parallel", unlike))
    assert "those that talk during it hide 25 % to 50 % of the time of their messages;" in said
    assert "PyTorch DDP, 25 MB hides 35 % to 45 %, and ranks do not agree whether" in said
    assert "Shares are of one step, ranges over all ranks." in said


def test_a_rank_that_saw_no_message_of_one_variant_hides_nothing_of_it() -> None:
    def half_blind(data: dict[str, Any]) -> None:
        hides(data, "bucketed_10", 0.60, 0.60)
        hides(data, "torch_ddp", 0.70)
        data["arms"]["torch_ddp"]["trace"]["overlapped_share_by_rank"] = [0.70, None]

    said = finding("overlap", changed("data_parallel", half_blind))
    assert "PyTorch DDP, 25 MB hides 70 %, and ranks do not agree whether" in said

    def alike(data: dict[str, Any]) -> None:
        hides(data, "bucketed_10", 0.40, 0.30)
        hides(data, "torch_ddp", 0.45, 0.35)

    agreed = finding("overlap", changed("data_parallel", alike))
    assert "(most: bucketed, 10 MB)" in agreed
    assert "agree" not in agreed


def test_no_more_can_hide_than_backward_lasts() -> None:
    said = finding("overlap", changed("data_parallel"))
    assert said.endswith(
        "behind backward alone, which lasts 80.0 ms: 31 % of the 257 ms for which the messages of "
        "overlapped are under way."
    )

    def more(data: dict[str, Any]) -> None:
        hides(data, "flat", 0.1)
        hides(data, "torch_ddp", 0.4)

    beyond = finding("overlap", changed("data_parallel", more))
    assert beyond.endswith("PyTorch DDP, 25 MB are under way; what shows beyond that is waiting.")

    def long(data: dict[str, Any]) -> None:
        data["phases_ms"]["backward"] = [1e4]

    assert "behind backward alone" not in finding("overlap", changed("data_parallel", long))


def test_the_model_finds_the_link_and_its_best_bucket() -> None:
    said = finding("buckets", changed("data_parallel"))
    assert "model fits with 2 GB/s and 0.50 ms a message" in said
    assert "Its best is 13 messages of" in said
    assert "it does not tell the two apart" not in said  # exact data: the model misses nothing
    assert "ms (root mean square) that it misses over all variants: its best is worth" in said

    def wavy(data: dict[str, Any]) -> None:
        for index, arm in enumerate(data["arms"].values()):
            more = (-1) ** index * 30.0
            arm["ranks_ms"] = [[time + more for time in times] for times in arm["ranks_ms"]]

    vague = finding("buckets", changed("data_parallel", wavy))
    assert "above its best, while over all variants it misses 28 ms (root mean square): it" in vague
    assert "it does not tell the two apart" in vague

    def off(data: dict[str, Any]) -> None:
        for name, arm in data["arms"].items():
            if name.startswith("bucketed_1"):
                arm["ranks_ms"] = [[3 * time for time in times] for times in arm["ranks_ms"]]

    bad = finding("buckets", changed("data_parallel", off))
    assert "the model does not describe these times" in bad.lower()


def leaning(data: dict[str, Any]) -> None:
    """Let what is sent after backward take longer than the model says."""
    for name in ("naive", "flat"):
        arm = data["arms"][name]
        arm["ranks_ms"] = [[time + 80.0 for time in times] for times in arm["ranks_ms"]]


def test_misses_of_the_model_that_lean_are_told() -> None:
    said = finding("buckets", changed("data_parallel", leaning))
    assert "Its misses lean: it says too little, by " in said
    assert "variants that send during it." in said
    assert "lean" not in finding("buckets", changed("data_parallel"))


def test_more_saved_than_backward_could_hide_is_said_only_where_rounds_show_it() -> None:
    said = finding("buckets", changed("data_parallel", leaning))
    assert "takes 146 ms less than flat (95 % interval" in said
    assert "8 rounds), and backward, all that could hide messages, lasts 80.0 ms: several" in said

    def uncertain(data: dict[str, Any]) -> None:
        leaning(data)
        sways(data, by_ms=100.0)

    within = finding("buckets", changed("data_parallel", uncertain))
    assert "lasts 80.0 ms: rounds do not show more saved than that." in within
    assert "several messages at once" not in within

    def unknown(data: dict[str, Any]) -> None:
        leaning(data)
        sways(data, by_ms=300.0)

    lost = finding("buckets", changed("data_parallel", unknown))
    assert lost.endswith("variants that send during it.")

    def no_flat(data: dict[str, Any]) -> None:
        leaning(data)
        data["arms"]["naive"] = data["arms"]["flat"]
        drop("arms", "flat")(data)

    alone = finding("buckets", changed("data_parallel", no_flat))
    assert alone.endswith("variants that send during it.")


def sways(data: dict[str, Any], by_ms: float) -> None:
    """Let flat take so much longer and shorter in turns, around the same median."""
    flat = data["arms"]["flat"]
    flat["ranks_ms"] = [
        [time + (-1) ** turn * by_ms for turn, time in enumerate(times)]
        for times in flat["ranks_ms"]
    ]


def test_a_variant_that_adds_nothing_measurable() -> None:
    def quick(data: dict[str, Any]) -> None:
        silent = data["arms"]["alone"]["ranks_ms"]
        data["arms"]["flat"]["ranks_ms"] = [[0.995 * time for time in times] for times in silent]

    assert "adds nothing measurable to a step at best" in finding(
        "summary", changed("data_parallel", quick)
    )

    def mute(data: dict[str, Any]) -> None:
        drop("arms", "alone")(data)

    assert "an unknown time" in finding("summary", changed("data_parallel", mute))


def test_skew_is_told() -> None:
    def one_late(data: dict[str, Any]) -> None:
        data["arms"]["flat"]["ranks_ms"] = [[100.0, 100.0, 100.0], [90.0, 100.0, 100.0]]
        data["arms"] = {"flat": data["arms"]["flat"]}

    assert finding("skew", changed("data_parallel", one_late)) == (
        "The first and the last rank of a step finish at most 0 % of the step apart in the median "
        "round (flat), and at most 10 % in any round (flat)."
    )


def test_checks_of_data_parallel() -> None:
    def quicker(data: dict[str, Any]) -> None:
        silent = data["arms"]["alone"]["ranks_ms"]
        data["arms"]["flat"]["ranks_ms"] = [[0.8 * time for time in times] for times in silent]

    def lost(data: dict[str, Any]) -> None:
        data["arms"]["naive"]["trace"]["messages_seen"] = 5

    def magic(data: dict[str, Any]) -> None:
        data["arms"]["flat"]["trace"]["communication_ms"] = 1e-3

    warnings = [part("checks", "data_parallel")(changed("data_parallel", c))
                for c in (quicker, lost, magic)]  # fmt: skip
    assert [len(some) for some in warnings] == [1, 1, 1]
    assert "flat takes 0.8 times as long as a step without communication" in warnings[0][0]
    assert "naive sends 111 messages, the trace has 5." in warnings[1][0]
    assert "a copy on this machine reaches 4,100 GB/s" in warnings[2][0]
