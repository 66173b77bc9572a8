"""The attention tables: numbers where there are some, reasons where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmlab.writeup.table import Table
from lmlab.writeup.tables.attention import tables
from tests.writeup import synthetic
from tests.writeup.small_attention import collected, nothing, without

OOM = ("oom", "asked for 128 GiB, 9 GiB free")


def column(table: Table, title: str) -> list[str]:
    index = [c.title for c in table.columns].index(title)
    return [row[index] for row in table.rows]


@pytest.fixture(scope="module")
def gpu() -> dict[str, Table]:
    return tables(collected())


def test_every_topic_has_its_tables(gpu: dict[str, Table]) -> None:
    assert list(gpu) == [
        *("naive", "account", "published_naive", "compiled_model", "limits"),
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
    assert {"account", "limits", "tiles", "leaderboard"}.isdisjoint(found)


def test_naive_has_times_and_memory(gpu: dict[str, Table]) -> None:
    table = gpu["naive"]
    assert column(table, "Sequence") == [*["1,024", "4,096", "8,192"] * 2, "65,536"]
    assert column(table, "Forward")[-1] == "OOM"
    assert column(table, "Peak")[0] == "98.5 MiB"
    assert "±" in column(table, "Compiled backward")[0]


def test_the_account_adds_up_beside_what_was_counted(gpu: dict[str, Table]) -> None:
    lost = gpu["account"]
    assert lost.title.endswith("head dim 64, sequence 65,536")
    assert lost.rows[-1] == ["measured", "–", "not counted", "not counted"]

    def fits(point: object, values: dict[str, Any]) -> bool | None:
        return False if values["status"] == "oom" else None

    table = tables(collected(fits))["account"]
    assert table.title.endswith("head dim 64, sequence 8,192")
    assert table.rows[-1][-1] == "6.08 GiB (100 % of the sum)"
    assert column(table, "Before backward")[6] == "–", "gradients come later"


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
    assert column(gpu["tiles"], "Backward, shared memory")[3] == "about 258 KiB"


def test_the_board_is_sorted_and_ends_with_published_entries(gpu: dict[str, Table]) -> None:
    names = column(gpu["leaderboard"], "Attention")
    assert names[:2] == ["SDPA cuDNN", "flash (ours)"]
    assert names[-1] == "published: best verified own Triton kernel, H100"
    assert column(gpu["leaderboard"], "Forward and backward")[-1] == "5.364"


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
