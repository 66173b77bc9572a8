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

    assert "no difference" in finding("messages", changed("data_parallel", alike))

    def quicker(data: dict[str, Any]) -> None:
        flat = data["arms"]["flat"]["ranks_ms"]
        data["arms"]["naive"]["ranks_ms"] = [[0.5 * time for time in times] for times in flat]

    assert "% shorter (0.500 times" in finding("messages", changed("data_parallel", quicker))


def test_the_same_messages_during_backward_instead_of_after_it() -> None:
    said = finding("during", changed("data_parallel"))
    assert "the same 111 messages during backward instead of after it makes a step" in said
    assert "% shorter (" in said
    assert "confirm" not in said

    def alike(data: dict[str, Any]) -> None:
        after = data["arms"]["naive"]["ranks_ms"]
        data["arms"]["overlapped"]["ranks_ms"] = [[*times[1:], times[0]] for times in after]

    no_gain = finding("during", changed("data_parallel", alike))
    assert "makes no difference that these rounds show; what the profiler shows" in no_gain

    def slower(data: dict[str, Any]) -> None:
        after = data["arms"]["naive"]["ranks_ms"]
        data["arms"]["overlapped"]["ranks_ms"] = [[1.2 * time for time in times] for times in after]
        data["arms"]["overlapped"]["trace"]["overlapped_share"] = 0.0

    loss = finding("during", changed("data_parallel", slower))
    assert "makes a step 20 % longer" in loss
    assert "confirm" not in loss
    alone = finding("during", changed("data_parallel", drop("arms", "overlapped")))
    assert "naive and overlapped were not both measured" in alone.lower()


def test_what_overlap_hides() -> None:
    said = finding("overlap", changed("data_parallel"))
    assert "naive and flat, which talk after backward, hide nothing" in said.lower()
    assert "those that talk during it hide 25 % of" in said
    assert "PyTorch DDP, 25 MB hides 25 %" in said

    def leaky(data: dict[str, Any]) -> None:
        data["arms"]["flat"]["trace"]["overlapped_share"] = 0.3
        data["arms"]["bucketed_10"]["trace"]["overlapped_share"] = 0.6

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

    for chapter in ("data_parallel", "fsdp"):
        assert "saw no message" in finding("overlap", changed(chapter, blind))


def test_the_model_finds_the_link_and_its_best_bucket() -> None:
    said = finding("buckets", changed("data_parallel"))
    assert "model fits with 2 GB/s and 0.50 ms a message" in said
    assert "Its best is 13 messages of" in said
    assert "it does not tell the two apart" not in said  # exact data: the model misses nothing
    assert "its best is worth trying" in said

    def wavy(data: dict[str, Any]) -> None:
        for index, arm in enumerate(data["arms"].values()):
            more = (-1) ** index * 30.0
            arm["ranks_ms"] = [[time + more for time in times] for times in arm["ranks_ms"]]

    assert "it does not tell the two apart" in finding("buckets", changed("data_parallel", wavy))

    def off(data: dict[str, Any]) -> None:
        for name, arm in data["arms"].items():
            if name.startswith("bucketed_1"):
                arm["ranks_ms"] = [[3 * time for time in times] for times in arm["ranks_ms"]]

    bad = finding("buckets", changed("data_parallel", off))
    assert "the model does not describe these times" in bad.lower()


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
    assert "of the step apart" in finding("skew", changed("data_parallel"))


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
