"""The attention tables: numbers where there are some, reasons where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.table import Table
from lmlab.writeup.tables.attention import tables
from tests.writeup import synthetic
from tests.writeup.small_attention import both, collected, noted, nothing, scaled, study, without

OOM = ("oom", "asked for 128 GiB, 9 GiB free")


def column(table: Table, title: str) -> list[str]:
    index = [c.title for c in table.columns].index(title)
    return [row[index] for row in table.rows]


@pytest.fixture(scope="module")
def gpu() -> dict[str, Table]:
    return tables(collected())


def test_every_topic_has_its_tables(gpu: dict[str, Table]) -> None:
    assert list(gpu) == [
        *("naive", "account_too_large", "account_largest", "published_naive"),
        *("compiled_naive", "compiled_model", "limits"),
        *("race_bf16_forward", "race_bf16_backward", "race_bf16_both", "published_race"),
        *("tiles", "leaderboard", "model"),
    ]
    for name, table in gpu.items():
        assert all(len(row) == len(table.columns) for row in table.rows), name
        assert table.sources, name


def test_a_cpu_has_no_tables_of_what_only_a_gpu_can_tell() -> None:
    found = tables(synthetic.collected("attention", "cpu"))
    assert {"tiles", "leaderboard", "limits", "compiled_model"}.isdisjoint(found)
    assert not any(name.startswith("published") for name in found)
    assert set(column(found["naive"], "Peak")) == {"not counted"}


def test_without_results_cells_say_so() -> None:
    found = tables(collected(nothing))
    assert set(column(found["naive"], "Forward")) == {"not measured"}
    assert set(column(found["race_bf16_both"], "flash (ours)")) == {"not measured"}
    assert set(column(found["model"], "Peak, naive")) == {"not measured"}
    assert set(column(found["compiled_model"], "First compiled step (s)")) == {"not measured"}
    assert not any(name.startswith("account") for name in found)
    assert {"limits", "lost", "tiles", "leaderboard"}.isdisjoint(found)


def test_points_without_a_result_are_left_out_and_counted() -> None:
    def some(point: Point, values: dict[str, Any]) -> bool | None:
        where = point.parameters
        return None if where.get("sequence") == 4096 or where.get("size") == "small" else False

    found = tables(collected(some))
    for name, title in (("naive", "Sequence"), ("race_bf16_both", "Sequence")):
        assert set(column(found[name], title)) == {"4,096"}, name
    assert found["naive"].caption.endswith(" 5 of 7 shapes are not measured and left out.")
    assert set(column(found["model"], "Size")) == {"small"}
    assert found["model"].caption.endswith(" 2 of 4 places are not measured and left out.")
    assert found["compiled_model"].caption.endswith(" 1 of 2 sizes is not measured and left out.")
    assert "left out" not in tables(collected())["naive"].caption


def test_naive_has_times_and_memory(gpu: dict[str, Table]) -> None:
    table = gpu["naive"]
    assert column(table, "Sequence") == [*["1,024", "4,096", "8,192"] * 2, "65,536"]
    assert column(table, "Forward")[-1] == "OOM"
    assert column(table, "Peak")[0] == "98.5 MiB"
    assert column(table, "Kept for backward")[0] == "32 MiB"
    compiled = gpu["compiled_naive"]
    assert column(compiled, "Sequence") == column(table, "Sequence")
    assert "±" in column(compiled, "Backward")[0]
    assert column(compiled, "Speed-up")[0].endswith("×")
    assert column(compiled, "First pass (s)")[0] == "4.20"


def test_the_account_adds_up_beside_what_was_counted(gpu: dict[str, Table]) -> None:
    full = gpu["account_too_large"]
    assert full.title.endswith("head dim 64, sequence 65,536, which does not fit")
    assert full.rows[-1][2:] == ["OOM"] * 3
    assert "what the allocator counted (asked for 128.00 GiB, 10.00 GiB free)." in full.caption
    assert column(full, "Peak in forward")[-2] == "257 GiB"

    table = gpu["account_largest"]
    assert table.title.endswith("head dim 64, sequence 8,192, which fits")
    assert table.rows[-1][-1] == "6.08 GiB (100 % of the sum)"
    held = {row[0]: row[2:] for row in table.rows}
    assert held["weights"] == ["2 GiB", "2 GiB", "2 GiB"]
    assert held["scores"] == ["2 GiB", "–", "–"], "they go when forward ends"
    assert held["gradient of scores"] == ["–", "–", "2 GiB"]


def test_the_caption_of_a_race_has_the_reasons() -> None:
    why = "unsupported", "on a CPU flash means nothing."
    gone = without({"flash": why, "flex": why}, topic="benchmark")
    full = both(gone, without({"naive": OOM}, topic="benchmark", sequence=4096))
    caption = tables(collected(full))["race_bf16_both"].caption
    assert (
        "in turns. Unsupported: FlexAttention and flash (ours) (on a CPU flash means nothing). "
        "OOM: naive (asked for 128 GiB, 9 GiB free)." in caption
    )
    assert "Over its cap" not in caption
    assert "Unsupported" not in tables(collected())["race_bf16_both"].caption


def test_published_times_stand_beside_ours(gpu: dict[str, Table]) -> None:
    table = gpu["published_naive"]
    assert [row[:3] for row in table.rows[:3]] == [
        ["NVIDIA H200", "this page", "naive"],
        ["H800 PCIe", "001", "naive"],
        ["RTX 4090", "002", "naive"],
    ]
    assert column(table, "4,096")[1] == "5.12 / 15.9"


def test_a_published_sweep_stands_beside_every_precision_of_ours(gpu: dict[str, Table]) -> None:
    table = gpu["published_race"]
    assert [row[2] for row in table.rows] == [
        *("naive, bf16", "flash (ours), bf16"),
        *("naive", "triton_tile16", "triton_tile_adaptive"),
    ]
    assert column(table, "4,096")[2] == "0.559 / 2.99"
    assert column(table, "128")[1] == "0.00429 / 0.0150"


def test_an_arm_that_did_not_fit_says_so_beside_published_times() -> None:
    table = tables(collected(without({"naive": OOM}, topic="benchmark")))["published_race"]
    assert column(table, "128")[0] == "OOM"


def test_a_study_without_publications_has_no_published_table(tmp_path: Path) -> None:
    made = collected()
    bare = tables(type(made)(**{**vars(made), "references": tmp_path}))
    assert not any(name.startswith("published") for name in bare)
    assert not any("published" in row[1] for row in bare["leaderboard"].rows)


def test_a_race_says_why_an_arm_has_no_time() -> None:
    change = without({"naive": OOM, "tiled": ("capped", "about 9 s")}, topic="benchmark")
    table = tables(collected(change))["race_bf16_both"]
    assert set(column(table, "naive")) == {"OOM"}
    assert set(column(table, "tiled (PyTorch)")) == {"over its cap"}


def test_limits_name_the_best_other_variant(gpu: dict[str, Table]) -> None:
    (row,) = gpu["limits"].rows
    assert row[:3] == ["bf16", "64", "4,096"]
    assert row[3].endswith(")")
    assert row[-1].endswith(" %")
    made = collected()
    bare = type(made)(**{**vars(made), "card": None})
    assert tables(bare)["limits"].rows[0][-1] == "no ceiling"


def test_tiles_that_do_not_fit_are_named(gpu: dict[str, Table]) -> None:
    cells = dict(
        zip(
            column(gpu["tiles"], "Kept × walked"), column(gpu["tiles"], "Forward (ms)"), strict=True
        )
    )
    assert cells["256 × 128"] == "does not fit"
    assert "chosen: 128 × 64, specialised warps" in cells
    assert column(gpu["tiles"], "Backward, shared memory")[3] == "needs 256 KiB"


def test_tiles_that_do_not_fit_for_another_reason_are_counted() -> None:
    full = both(
        without({"256x128": ("unsupported", "tiles 256 x 128: too many registers")}),
        noted("256x128", shared_by_count_bytes=2**18, kept=256, walked=128),
    )
    table = tables(collected(full))["tiles"]
    assert column(table, "Forward, shared memory")[3] == "about 256 KiB"


def test_directions_that_choose_other_tiles_have_a_line_each() -> None:
    def wider(point: Point, values: dict[str, Any]) -> None:
        if point.parameters.get("direction") == "forward":
            values["data"]["arms"]["chosen"].update(walked=128)

    table = tables(collected(wider))["tiles"]
    assert [row[1] for row in table.rows[-2:]] == [
        "chosen: 128 × 128, specialised warps",
        "chosen: 128 × 64, specialised warps",
    ]
    forward, backward = column(table, "Forward (ms)"), column(table, "Backward (ms)")
    assert (forward[-1], backward[-2]) == ("–", "–")
    assert "–" not in (forward[-2], backward[-1])


def test_every_place_where_another_variant_is_faster_is_listed() -> None:
    table = tables(collected(scaled({"flash.forward": 1.8}, topic="benchmark", sequence=128)))
    assert table["lost"].rows[0][:5] == ["bf16", "64", "128", "forward", "SDPA efficient"]
    ratios = [float(cell.rstrip("×")) for cell in column(table["lost"], "Speed-up of ours")]
    assert ratios == sorted(ratios)
    assert ratios[-1] < 1
    assert "lost" not in tables(collected(scaled({"flash": 0.1}, topic="benchmark")))


def test_a_long_sweep_beside_publications_shows_every_other_sequence() -> None:
    sequences = [2**n for n in range(7, 16)]
    table = tables(collected(what=study(benchmark={"sequences": sequences})))["published_race"]
    assert [c.title for c in table.columns[3:]] == ["128", "512", "2,048", "8,192", "32,768"]


def test_a_failure_in_the_race_is_explained_below_it() -> None:
    wrong = without({"flash": ("failed", "output off by 1; allowed is 0")}, sequence=128)
    caption = tables(collected(wrong))["race_bf16_both"].caption
    assert "Failed: gave wrong numbers or broke" in caption
    assert "not asked for" not in caption, "all variants take part at all shapes"
    assert "Failed" not in tables(collected())["race_bf16_both"].caption


def test_the_board_is_sorted_and_ends_with_published_entries(gpu: dict[str, Table]) -> None:
    names = column(gpu["leaderboard"], "Attention")
    assert names[:2] == ["SDPA cuDNN", "flash (ours)"]
    assert names[-1] == "published: best verified own Triton kernel, H100"
    assert column(gpu["leaderboard"], "Forward and backward")[-1] == "5.364"
    against = column(gpu["leaderboard"], "Ours as fast as it: forward, backward, both")
    assert against[:2] == ["0.983× ≈, 0.983× ≈, 0.983× ≈", "–"]
    assert against[-1] == "–"


def test_the_model_with_an_arm_that_does_not_fit() -> None:
    table = tables(collected(without({"naive": OOM}, topic="model", size="small")))["model"]
    assert column(table, "naive (ms)")[:2] == ["OOM", "OOM"]
    assert column(table, "Speed-up of flash (ours)")[0] == "–"
    assert column(table, "Speed-up of flash (ours)")[-1] == "1.67×"


def test_a_model_that_did_not_compile_keeps_its_eager_times() -> None:
    gone = without({"compiled": ("failed", "it broke")}, topic="model_compile")
    table = tables(collected(gone))["compiled_model"]
    assert column(table, "Forward")[0] == "2.12 → failed"
    assert column(table, "First compiled step (s)")[0] == "failed"
