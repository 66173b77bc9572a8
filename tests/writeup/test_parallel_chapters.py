"""Pages of the chapters of several ranks: every sentence, from data that calls for it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.build import document_of
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import save
from lmlab.writeup.registry import part
from tests.writeup import factory, synthetic, synthetic_parallel

CHAPTERS = ("data_parallel", "sharded_optimizer", "fsdp")
KEY = "shared_gpu_2"
WHO = "2 ranks that share one GPU, gloo"


def changed(chapter: str, change: Any = None, **how: Any) -> Collected:
    """A chapter of the synthetic study, its measured job altered in place by `change`."""

    def make(point: Point, device: str) -> Result:
        result: Result = getattr(synthetic_parallel, chapter)(point, device, **how)
        if change is None or result.status != "ok":
            return result
        data = deepcopy(dict(result.data))
        change(data)
        return replace(result, data=data)

    return synthetic.collected(chapter, make=make)


def finding(name: str, collected: Collected) -> str:
    findings: dict[str, str] = part("findings", collected.chapter)(collected)
    return findings.get(name) or findings[f"{name}_{KEY}"]


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
    assert "small, the largest of the study. An all-reduce moves 2 GB/s" in largest
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


def drop(*path: str) -> Any:
    """Take an arm's times away, as for one that failed or does not run here."""

    def change(data: dict[str, Any]) -> None:
        *ways, name = path
        for way in ways:
            data = data[way]
        data[name] = {"status": "failed", "reason": "gradients are off by 0.1",
                      "messages": 1, "message_bytes": 4, "largest_message_bytes": 4}  # fmt: skip

    return change


def test_a_comparison_without_the_other_is_not_measured() -> None:
    both = finding("counts", changed("data_parallel"))
    assert both == "With buckets of 25 MB ours sends 20 messages in a step, PyTorch's 21."
    collected = changed("data_parallel", drop("arms", "torch_ddp"))
    assert "not both seen" in finding("counts", collected)
    assert "was not measured" in finding("verdict", collected)
    assert part("tables", "data_parallel")(collected)["verdict"].rows[0][-1] == "not measured"
    assert "not measured" in finding("summary", collected)


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


@pytest.mark.parametrize(
    ("chapter", "words"),
    [("data_parallel", "its step computes for 64.0 ms, 25 % of that."),
     ("fsdp", "FSDP could hide 21 % at most: its step computes for 64.0 ms, and messages")],
)  # fmt: skip
def test_no_more_can_be_hidden_than_is_computed(chapter: str, words: str) -> None:
    def little(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["trace"]["compute_ms"] = 64.0

    assert words in finding("overlap", changed(chapter, little))

    def much(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            arm["trace"]["compute_ms"] = 1e4

    assert "computes for" not in finding("overlap", changed(chapter, much))


def test_bars_that_thinning_out_has_made_longer_are_pale_and_said_to_be() -> None:
    figures = part("figures", "data_parallel")
    assert "Pale" not in figures(changed("data_parallel"))[f"overlap_{KEY}"].caption

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


def test_what_sharding_saves() -> None:
    said = finding("saved", changed("sharded_optimizer"))
    assert "holds 491 MiB of optimizer state instead of 981 MiB" in said
    assert "that saves 25 %" in said

    def greedy(data: dict[str, Any]) -> None:
        for rank in data["memory"]["arms"]["sharded"]["ranks"]:
            rank["moments"]["after_step"]["allocated_bytes"] *= 2

    worse = finding("saved", changed("sharded_optimizer", greedy))
    assert "saves nothing: it takes" in worse
    assert worse.endswith("more.")


def test_the_device_may_report_more_while_tensors_hold_less() -> None:
    said = finding("device", changed("sharded_optimizer"))
    assert "reports more before the step than after forward" in said
    assert "the allocator keeps what was freed" in said
    on_cpu = synthetic.collected("sharded_optimizer", "cpu")
    assert "stays with the process" in part("findings", "sharded_optimizer")(on_cpu)["device_cpu_2"]

    def calm(data: dict[str, Any]) -> None:
        for arm in data["memory"]["arms"].values():
            for rank in arm["ranks"]:
                for moment in rank["moments"].values():
                    moment["device_bytes"] = 1

    assert "nowhere here does" in finding("device", changed("sharded_optimizer", calm)).lower()


def crowded(data: dict[str, Any]) -> None:
    """The allocator grows in the optimizer's step of one arm, though that uses little."""
    for rank in data["arms"]["ddp_sharded_optimizer"]["ranks"]:
        rank["peaks_bytes"] = {"forward_backward": 900 * 2**20, "optimizer": 500 * 2**20}
        rank["moments"]["after_step"].update(reserved_bytes=9000 * 2**20, device_bytes=9600 * 2**20)


def test_a_device_that_reports_more_with_shards_than_without() -> None:
    said = finding("device", changed("fsdp", crowded))
    assert said.startswith("After the step, tensors hold 491 MiB less with a sharded optimizer")
    assert "the step uses 500 MiB at most, and still the allocator takes" in said

    def unknown_peaks(data: dict[str, Any]) -> None:
        crowded(data)
        for rank in data["arms"]["ddp_sharded_optimizer"]["ranks"]:
            rank["peaks_bytes"]["optimizer"] = None

    assert "the allocator keeps what was freed" in finding("device", changed("fsdp", unknown_peaks))


def peaks(**mib: tuple[int, int]) -> Any:
    """Peaks of forward with backward, and of the optimizer's step, by arm."""

    def change(data: dict[str, Any]) -> None:
        for name, (first, second) in mib.items():
            for rank in data["memory"]["arms"][name]["ranks"]:
                rank["peaks_bytes"] = {
                    "forward_backward": first * 2**20, "optimizer": second * 2**20
                }  # fmt: skip

    return change


@pytest.mark.parametrize(
    ("plain", "ours", "words"),
    [
        ((100, 400), (100, 300), "in the optimizer's step: with the sharded optimizer it falls "
         "from 400 MiB to 300 MiB, to 75 %."),
        ((100, 200), (250, 100), "in the optimizer's step and forward and backward: with the "
         "sharded optimizer it rises from 200 MiB to 250 MiB"),
        ((200, 100), (200, 100), "in forward and backward: with the sharded optimizer it stays "
         "at 200 MiB."),
    ],
    ids=["lower", "higher", "same"],
)  # fmt: skip
def test_the_peak_of_a_step(plain: tuple[int, int], ours: tuple[int, int], words: str) -> None:
    assert "peak" not in finding("saved", changed("sharded_optimizer"))
    collected = changed("sharded_optimizer", peaks(replicated=plain, sharded=ours))
    assert words in finding("saved", collected)
    table = part("tables", "sharded_optimizer")(collected)[f"peaks_{KEY}"]
    assert table.rows[0] == ["AdamW on every rank", *(f"{peak:,}" for peak in plain)]


def test_the_cost_model_beside_what_was_measured() -> None:
    assert (
        "every part is as large as the cost model expects"
        in finding("expected", changed("sharded_optimizer")).lower()
    )

    def off(data: dict[str, Any]) -> None:
        data["memory"]["expected"]["activations"] *= 2

    said = finding("expected", changed("sharded_optimizer", off))
    assert "furthest off with activations" in said
    assert "50 % less than expected" in said

    def unknown(data: dict[str, Any]) -> None:
        data["memory"]["expected"] = None

    collected = changed("sharded_optimizer", unknown)
    assert "does not describe this model" in finding("expected", collected)
    assert f"expected_{KEY}" not in part("tables", "sharded_optimizer")(collected)


@pytest.mark.parametrize(
    ("phase_ms", "words"),
    [(10.0, "rounds do not tell"), (900.0, "is worth more than"), (1.0, "costs more than")],
)
def test_what_sharding_does_to_the_optimizers_time(phase_ms: float, words: str) -> None:
    def change(data: dict[str, Any]) -> None:
        arms = data["time"]["arms"]
        rounds = len(arms["replicated"]["optimizer_ms"][0])
        wobble = [phase_ms * (1 + 0.05 * (-1) ** i) for i in range(rounds)]
        arms["replicated"]["optimizer_ms"] = [wobble] * 2
        if phase_ms == 10.0:
            arms["sharded"]["optimizer_ms"] = [wobble[::-1]] * 2

    assert words in finding("cost", changed("sharded_optimizer", change))


def test_optimizers_that_were_not_timed() -> None:
    def change(data: dict[str, Any]) -> None:
        data["time"]["arms"] = {}

    assert "were not timed" in finding("cost", changed("sharded_optimizer", change))

    def off(data: dict[str, Any]) -> None:
        arm = data["memory"]["arms"]["torch_zero"]
        arm.update(status="failed", reason="weights after a step are off by 0.1")
        del data["time"]["arms"]["torch_zero"]

    said = finding("cost", changed("sharded_optimizer", off))
    assert said.endswith(
        "ZeroRedundancyOptimizer has no time: weights after a step are off by 0.1."
    )


def test_stage_1_of_zero_sends_a_third_less() -> None:
    said = finding("zero", changed("sharded_optimizer"))
    assert "the same share of the state as an even cut" in said
    assert "a rank sends 736 MiB in a step where stage 1 of ZeRO sends 491 MiB" in said

    def uneven(data: dict[str, Any]) -> None:
        data["memory"]["owned_bytes"] = [60, 40]

    assert "keeps 20 % more of the state" in finding("zero", changed("sharded_optimizer", uneven))


def test_shards_that_do_not_add_up_are_warned_of() -> None:
    def lose(data: dict[str, Any]) -> None:
        for rank in data["memory"]["arms"]["sharded"]["ranks"]:
            rank["moments"]["after_step"]["parts_bytes"]["optimizer_state"] //= 2

    (warning,) = part("checks", "sharded_optimizer")(changed("sharded_optimizer", lose))
    assert "add up to 491 MiB, the whole state is 981 MiB" in warning


def test_memory_of_fsdp_beside_data_parallelism() -> None:
    said = finding("memory", changed("fsdp"))
    shares = "75 % with a sharded optimizer, 50 % with FSDP and 50 % with PyTorch fully_shard."
    assert shares in said
    assert "FSDP holds most after forward: activations are nobody's to shard" in said

    def few_activations(data: dict[str, Any]) -> None:
        for arm in data["arms"].values():
            for rank in arm["ranks"]:
                rank["moments"]["after_forward"]["allocated_bytes"] = 1

    little = finding("memory", changed("fsdp", few_activations))
    assert little.endswith("FSDP holds most after the step.")

    def alone(data: dict[str, Any]) -> None:
        data["arms"] = {"ddp": data["arms"]["ddp"]}

    collected = changed("fsdp", alone)
    assert "memory was not read of two arms" in finding("memory", collected).lower()
    assert "were not both measured" in finding("summary", collected)
    assert "FSDP has no time beside another arm" in finding("speed", collected)


def counted_by_the_cost_model(data: dict[str, Any]) -> None:
    whole = data["parameter_bytes"]
    data["expected"] = {"parameters": whole, "gradients": whole, "optimizer_state": 2 * whole,
                        "activations": 900 * 2**20}  # fmt: skip


def test_parts_of_fsdp_beside_the_cost_model() -> None:
    assert "does not describe this model" in finding("expected", changed("fsdp"))
    assert f"expected_{KEY}" not in part("tables", "fsdp")(changed("fsdp"))
    collected = changed("fsdp", counted_by_the_cost_model)
    assert finding("expected", collected).startswith("Every part is as large as the cost model")
    rows = {row[0]: row[1:] for row in part("tables", "fsdp")(collected)[f"expected_{KEY}"].rows}
    assert rows["FSDP"] == ["245 (245)", "245 (245)", "491 (491)", "900 (900)"]
    assert rows["with sharded optimizer"][1:3] == ["491 (491)", "491 (491)"]

    def off(data: dict[str, Any]) -> None:
        counted_by_the_cost_model(data)
        data["expected"]["activations"] //= 2

    assert "is 100 % more than expected" in finding("expected", changed("fsdp", off))


def test_how_many_messages_fsdp_sends() -> None:
    said = finding("messages", changed("fsdp"))
    assert said == "FSDP sends 20 messages in a step, PyTorch fully_shard 20."
    assert "not both seen" in finding("messages", changed("fsdp", refuse))


def refuse(data: dict[str, Any]) -> None:
    data["arms"]["torch_fully_shard"] = {"status": "unsupported", "reason": "no such mesh"}


def test_an_arm_that_does_not_run_here() -> None:
    collected = changed("fsdp", refuse)
    assert "PyTorch fully_shard: unsupported (no such mesh)." in finding("speed", collected)
    table = part("tables", "fsdp")(collected)[f"steps_{KEY}"]
    assert table.rows[-1][:2] == ["PyTorch fully_shard", "unsupported"]
    assert "was not measured" in finding("verdict", collected)
    assert len(part("tables", "fsdp")(collected)[f"memory_{KEY}"].rows) == 3 * 4


def test_fsdps_step_beside_what_shards_less() -> None:
    assert (
        "a step of fsdp takes 3.00 times as long as that of data parallelism"
        in finding("speed", changed("fsdp")).lower()
    )

    def same(data: dict[str, Any]) -> None:
        ours = data["arms"]["fsdp"]["ranks_ms"]
        data["arms"]["ddp"]["ranks_ms"] = [[*times[1:], times[0]] for times in ours]

    assert "cannot be told from that of data parallelism" in finding("speed", changed("fsdp", same))


@pytest.mark.parametrize(
    ("wait_ms", "words"),
    [(0.05, "8 of 8 gathers end before"), (3.0, "only 2 of 8 gathers end before")],
)
def test_whether_weights_come_in_time(wait_ms: float, words: str) -> None:
    assert words in finding("waits", changed("fsdp", wait_ms=wait_ms)).lower()


def test_waits_are_summed_on_one_rank() -> None:
    def in_turns(data: dict[str, Any]) -> None:
        data["waits"] = [
            [{**row, "wait_ms": 12.0 * (index % 2 == rank)} for index, row in enumerate(rows)]
            for rank, rows in enumerate(data["waits"])
        ]

    collected = changed("fsdp", in_turns)
    assert "a rank waits 48.0 ms, 4.0 % of a median step" in finding("waits", collected)
    assert part("tables", "fsdp")(collected)[f"waits_{KEY}"].rows[0][3] == "24.0"


def test_no_weight_in_time_and_none_watched() -> None:
    def late(data: dict[str, Any]) -> None:
        for rank in data["waits"]:
            for row in rank:
                row["wait_ms"] = 5.0

    assert (
        "no gather ends before its layer needs it"
        in finding("waits", changed("fsdp", late)).lower()
    )

    def unwatched(data: dict[str, Any]) -> None:
        data["waits"] = None

    collected = changed("fsdp", unwatched)
    assert "gathers were not watched" in finding("waits", collected).lower()
    assert f"waits_{KEY}" not in part("tables", "fsdp")(collected)


def test_fsdp_that_keeps_more_than_its_share_is_warned_of() -> None:
    def hoard(data: dict[str, Any]) -> None:
        for rank in data["arms"]["fsdp"]["ranks"]:
            rank["moments"]["after_step"]["parts_bytes"]["parameters"] *= 2

    (warning,) = part("checks", "fsdp")(changed("fsdp", hoard))
    assert "would be its share" in warning


def test_published_steps_take_the_slowest_rank() -> None:
    table = part("tables", "data_parallel")(changed("data_parallel"))["published"]
    assert ["2x RTX 4090", "medium", "naive", "506"] in [list(row) for row in table.rows]


def test_sizes_that_may_be_chosen_are_in_the_appendix() -> None:
    document = document_of(changed("fsdp"))
    assert [size["size"] for size in document["sizes"]] == ["xl", "large", "medium", "small"]
    assert document["settings"]["sizes"] == ["xl, large, medium, small"]
