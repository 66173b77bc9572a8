"""FSDP: every sentence, from data that calls for it."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib import pyplot as plt

from lmlab.writeup.registry import part
from tests.writeup.parallel_pages import KEY, changed, finding


def test_memory_of_fsdp_beside_data_parallelism() -> None:
    said = finding("memory", changed("fsdp"))
    shares = "75 % with a sharded optimizer, 50 % with FSDP and 50 % with PyTorch fully_shard."
    assert shares in said
    assert "FSDP holds most after forward: activations are not sharded" in said

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
    assert finding("speed", changed("fsdp")) == (
        "A step of FSDP takes 3.00 times as long as that of data parallelism and 1.85 times as "
        "long as that of data parallelism with a sharded optimizer."
    )

    def same(data: dict[str, Any]) -> None:
        ours = data["arms"]["fsdp"]["ranks_ms"]
        data["arms"]["ddp"]["ranks_ms"] = [[*times[1:], times[0]] for times in ours]

    assert finding("speed", changed("fsdp", same)) == (
        "A step of FSDP takes 1.85 times as long as that of data parallelism with a sharded "
        "optimizer and cannot be told from that of data parallelism."
    )


def test_the_pace_of_messages_tells_why_as_many_bytes_take_longer() -> None:
    def slow_gathers(data: dict[str, Any]) -> None:
        data["arms"]["fsdp"]["trace"]["communication_ms"] = 1000.0

    said = finding("speed", changed("fsdp", slow_gathers))
    assert "With a sharded optimizer a rank must send about as many bytes, but of these all" in said
    assert "carry 2.57 GB/s here while messages are under way, gathers and scatters 0.772 " in said
    assert said.endswith("(gloo sends more for a scatter than it must).")

    def over_nccl(data: dict[str, Any]) -> None:
        slow_gathers(data)
        data["ranks"].update(backend="nccl", gpus=2)

    nccl = part("findings", "fsdp")(changed("fsdp", over_nccl))[f"speed_{KEY}"]
    assert nccl.endswith("gathers and scatters 0.772.")
    assert "GB/s" not in finding("speed", changed("fsdp")), "both at one pace"


def test_what_is_hidden_next_to_nothing() -> None:
    def hardly(data: dict[str, Any]) -> None:
        data["arms"]["fsdp"]["trace"].update(
            overlapped_share=1e-5, overlapped_share_by_rank=[1e-5, 2e-5]
        )
        data["arms"]["ddp"]["trace"]["overlapped_share_by_rank"] = [0.1, 0.2]

    collected = changed("fsdp", hardly)
    said = finding("overlap", collected)
    assert "data parallel 10 % to 20 %" in said
    assert "FSDP next to nothing" in said
    assert "so these are upper bounds" in said
    rows = part("tables", "fsdp")(collected)[f"steps_{KEY}"].rows
    assert rows[2][-1] == "next to nothing"
    own = {"backend": "nccl", "gpus": 2}
    kernels = part("findings", "fsdp")(changed("fsdp", lambda data: data["ranks"].update(own)))
    assert "upper bounds" not in kernels[f"overlap_{KEY}"]


@pytest.mark.parametrize(
    ("wait_ms", "words"),
    [(0.05, "7 of 7 gathers end before their layer needs them."),
     (3.0, "only 1 of 7 gathers ends before its layer needs it.")],
)  # fmt: skip
def test_whether_weights_come_in_time(wait_ms: float, words: str) -> None:
    assert words in finding("waits", changed("fsdp", wait_ms=wait_ms)).lower()


def test_weights_that_stay_between_forward_and_backward_are_no_gather() -> None:
    collected = changed("fsdp")
    said = finding("waits", collected)
    assert said.endswith(
        "The weights of lm_head, which ends forward and begins backward, stay in between and are "
        "gathered once."
    )
    rows = part("tables", "fsdp")(collected)[f"waits_{KEY}"].rows
    assert [row[1] for row in rows] == ["4", "3"]
    drawing = part("figures", "fsdp")(collected)[f"waits_{KEY}"]
    assert "lm_head is not gathered again in backward." in drawing.caption
    assert "n = " not in drawing.caption, "rounds are not the steps in which gathers are watched"

    def in_one_order(data: dict[str, Any]) -> None:
        data["waits"] = [[*rank[:4], *rank[:3:-1]] for rank in data["waits"]]

    other = changed("fsdp", in_one_order)
    assert "only 2 of 8 gathers end" in finding("waits", other).lower()
    assert "gathered once" not in finding("waits", other)


def test_gathers_that_are_hardly_late() -> None:
    said = finding("waits", changed("fsdp", wait_ms=0.3))
    assert "6 are hardly late, by 0.30 ms at most." in said

    def one(data: dict[str, Any]) -> None:
        for rank in data["waits"]:
            rank[-1]["wait_ms"] = 0.5

    assert "1 is hardly late, by 0.50 ms at most (token_embeddings in backward)." in finding(
        "waits", changed("fsdp", one)
    )
    assert "hardly" not in finding("waits", changed("fsdp"))


def test_low_bars_have_their_value_written() -> None:
    def low(data: dict[str, Any]) -> None:
        for rank in data["waits"]:
            rank[-1]["wait_ms"] = 0.05

    draw = part("figures", "fsdp")(changed("fsdp", low))[f"waits_{KEY}"].draw
    assert draw is not None
    figure = draw()
    written = [text.get_text() for text in figure.axes[1].texts]
    assert written == ["0.050"]
    assert "in time: at most 0.2 ms" in figure.axes[0].get_legend_handles_labels()[1]
    plt.close(figure)


def sent(change: Any = None) -> dict[str, str]:
    """What a rank must send, by arm."""
    rows = part("tables", "fsdp")(changed("fsdp", change))[f"steps_{KEY}"].rows
    return {row[0]: row[4] for row in rows}


def test_what_stays_between_forward_and_backward_is_sent_once() -> None:
    unknown = sent()
    assert unknown["FSDP"] == "≤ 736 MiB"
    assert unknown["PyTorch fully_shard"] == "736 MiB"

    def keep(data: dict[str, Any]) -> None:
        counted_by_the_cost_model(data)
        for rank in data["arms"]["torch_fully_shard"]["ranks"]:
            rank["moments"]["after_forward"]["parts_bytes"]["parameters"] += 30 * 2**20

    known = sent(keep)
    # Half of 4 bytes for each of 10,000 x 768 entries of the head, of two ranks.
    assert known["FSDP"] == "721 MiB"
    assert known["PyTorch fully_shard"] == "706 MiB"


def test_waits_are_summed_on_one_rank() -> None:
    def in_turns(data: dict[str, Any]) -> None:
        data["waits"] = [
            [{**row, "wait_ms": 12.0 * (index % 2 == rank)} for index, row in enumerate(rows)]
            for rank, rows in enumerate(data["waits"])
        ]

    collected = changed("fsdp", in_turns)
    assert "on a rank together are 48.0 ms, 4.0 % of a median step" in finding("waits", collected)
    assert part("tables", "fsdp")(collected)[f"waits_{KEY}"].rows[0][3] == "24.0"


def test_no_weight_in_time_and_none_watched() -> None:
    def late(data: dict[str, Any]) -> None:
        for rank in data["waits"]:
            for row in rank:
                row["wait_ms"] = 5.0

    said = finding("waits", changed("fsdp", late))
    assert said.startswith(
        "On the rank where a layer waits longest, none of 7 gathers ends before its layer needs "
        "it: the link is slower than the layers."
    )

    def but_one(wait_ms: float, ranks: slice) -> str:
        def change(data: dict[str, Any]) -> None:
            late(data)
            data["waits"] = [[dict(row) for row in rank] for rank in data["waits"]]
            for rank in data["waits"][ranks]:
                rank[1]["wait_ms"] = wait_ms

        return finding("waits", changed("fsdp", change))

    for other in (but_one(0.0, slice(1)), but_one(0.3, slice(2))):
        assert "none of 7 gathers ends before its layer needs it." in other
        assert "the link" not in other, "a layer that hardly waits does not wait for a slow link"

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
