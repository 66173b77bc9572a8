"""Points of the chapters: every combination that the study asks for, once; and none measured."""

import re
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from lmlab.jobs.catalog import all_points, points_of
from lmlab.study import config_file
from lmlab.study.config import load
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from tests.chapters.pages import answer, rendered
from tests.project import config
from tests.report.study import written

CONFIG = config()
GRAPH_CHECK = CONFIG["studies"]["full"]["end_to_end"]["graph_checks"][0]


def points(
    chapter: str, part: str | None = None, study: str = "full", **changes: Any
) -> list[Point]:
    """A study's points with other keys in the chapter's block, or in a part of it."""
    changed = config(study=study)
    block = changed["studies"][study][chapter]
    (block[part] if part else block).update(changes)
    return points_of(load(changed, "cuda"), chapter)


def of(topic: str, chapter: str = "attention", **changes: Any) -> list[Point]:
    asked = points(chapter, topic if changes else None, **changes)
    return [point for point in asked if point.parameters["topic"] == topic]


def test_the_end_to_end_grid_has_its_points_once_and_checks_some_of_them() -> None:
    check = {"size": "cpu-small", "context": 8, "precision": "bf16", "batch": 2}
    block = {"modes": ["forward_backward"], "graph_checks": [check], "steps": 3, "max_steps": 9}
    block |= {"more": [{"contexts": [8, 16]}, {"batches": [1], "precisions": ["fp32"], "steps": 2}]}
    found = points("end_to_end", study="nano", **block)
    warm = [point for point in found if point.parameters["start"] == "warm"]
    axes = [tuple(point.parameters[key] for key in check) for point in warm]
    assert axes == [
        *(("cpu-small", 16, precision, 2) for precision in ("fp32", "bf16")),
        *(("cpu-small", 8, precision, 2) for precision in ("fp32", "bf16")),
        ("cpu-small", 16, "fp32", 1),
    ]
    assert [point.settings["graph_replay"] for point in warm] == [False, False, False, True, False]
    assert [point.settings["steps"] for point in warm] == [3, 3, 3, 3, 2]
    assert {point.settings["max_steps"] for point in warm} == {9}
    assert all("max_steps" not in point.settings for point in found if point not in warm)
    block["more"].append({"contexts": [8], "steps": 10})  # more of what there is
    with pytest.raises(ValueError, match=r"end_to_end.max_steps = 9; allowed: at least steps = 10"):
        points("end_to_end", study="nano", **block)
    with pytest.raises(ValueError, match=r"end_to_end.max_steps = 2; allowed: at least steps = 3"):
        points("end_to_end", study="nano", **{**block, "max_steps": 2})


def test_the_example_of_attention_shapes_is_a_study_of_attention_alone() -> None:
    changed = config(study="full")
    update_config(changed, config_file.read(ROOT / "examples" / "attention_shapes.yaml"))
    found = all_points(load(changed, "cuda"))
    assert {point.chapter for point in found} == {"machine", "attention"}
    asked = [{**p.parameters, **p.settings} for p in found if p.chapter == "attention"]
    head_dims = {point["d_model"] // point["num_heads"] for point in asked}
    assert head_dims == {32, 64, 80, 96, 128, 192, 256}
    assert {point["context"] % 2 for point in asked} == {0, 1}
    assert {point["batch"] for point in asked} == {1, 2, 4, 16, 64}


def test_only_strategies_that_divide_the_blocks_are_asked_for() -> None:
    asked = of("checkpointing", "memory", strategies=["none", "every-3"], sizes=["xl", "2.7b"])
    found = {point.parameters["size"]: point.settings["strategies"] for point in asked}
    assert found == {"xl": "none,every-3", "2.7b": "none"}  # 48 and 32 blocks


@pytest.mark.parametrize("changes", [{"profiler": "torch"}, {"nsys_options": ["--stats=true"]}])
def test_another_tool_replaces_a_result_instead_of_adding_one(changes: dict[str, Any]) -> None:
    first, other = (points("profile", **each)[0].path(Path("r"), "m") for each in ({}, changes))
    assert first == other


@pytest.mark.parametrize(
    ("chapter", "part", "key", "wrong"),
    [
        ("memory", "checkpointing", "strategies", ["every-0"]),
        ("memory", "checkpointing", "sizes", ["huge"]),
        ("memory", "checkpointing", "size", "xl"),
        ("profile", None, "profiler", "nvprof"),
        ("end_to_end", None, "graph_checks", [{**GRAPH_CHECK, "size": "larg"}]),
        *(("profile", None, "nsys_options", [o]) for o in ("stats", "--output=x", "--a=$(id)")),
    ],
)
def test_wrong_values_are_one_line(chapter: str, part: str | None, key: str, wrong: Any) -> None:
    place = ".".join(word for word in (chapter, part, key) if word)
    with pytest.raises(ValueError, match=rf"^[^\n]*{place}[^\n]*(allowed|now called)[^\n]*$"):
        points(chapter, part, **{key: wrong})


def test_a_variant_can_be_limited_to_some_shapes() -> None:
    limits: dict[str, list[dict[str, list[Any]]]] = {
        "flex": [{"head_dims": [64], "sequences": [1024]}],
        "compiled": [{"sequences": [128], "precisions": ["bf16"]}],
        "naive": [{"head_dims": [16]}, {"head_dims": [64], "sequences": [128]}],
    }
    found = of("benchmark", only_at=limits)
    at = {
        name: [
            tuple(point.parameters[key] for key in ("precision", "head_dim", "sequence"))
            for point in found
            if name in point.settings["variants"]
        ]
        for name in ("flex", "compiled", "naive", "flash")
    }
    assert at["flex"] == [("bf16", 64, 1024), ("fp32", 64, 1024)]
    assert {(precision, sequence) for precision, _, sequence in at["compiled"]} == {("bf16", 128)}
    assert {(d, n) for _, d, n in at["naive"]} == {
        (d, n) for _, d, n in at["flash"] if d == 16 or (d, n) == (64, 128)
    }
    assert len(at["flash"]) == len(found)
    # Where no variant is left there is nothing to measure.
    assert len(of("benchmark", variants=["flex"], only_at=limits)) == 2


def test_the_leaderboard_is_the_published_shape_and_backward_swaps_tile_sizes() -> None:
    board = of("leaderboard")[0]
    asked = {**board.settings, **board.parameters}
    keys = ("batch", "heads", "sequence", "head_dim", "precision", "causal")
    assert [asked[key] for key in keys] == [1, 16, 16384, 64, "bf16", True]
    forward, backward = (point.settings["tiles"] for point in of("tiles")[:2])
    assert [128, 16] in forward
    assert [pair[::-1] for pair in backward] == forward


@pytest.mark.parametrize("chapter", ["data_parallel", "sharded_optimizer", "fsdp"])
def test_ranks_choose_from_all_sizes_in_every_placement_and_world(chapter: str) -> None:
    found = points(chapter)
    worlds = [(p.parameters["placement"], p.parameters["world_size"]) for p in found]
    assert worlds == [*(("own_gpu", n) for n in (2, 4, 6, 8)), ("shared_gpu", 2)]
    sizes = found[0].settings["sizes"]
    assert [size["size"] for size in sizes] == ["xl", "large", "medium", "small"]
    assert sizes[0] == {"size": "xl", **CONFIG["sizes"]["xl"]}
    assert found[0].settings["vocab_size"] == 10000
    assert "d_model" not in found[0].settings


def test_the_torch_bucket_has_one_of_ours_of_the_same_size() -> None:
    for name in ("full", "tiny", "nano"):
        settings = points("data_parallel", study=name)[0].settings
        assert settings["torch_bucket_mb"] in settings["bucket_sizes_mb"]


@pytest.mark.slow
def test_every_question_of_a_study_without_results_is_answered(tmp_path: Path) -> None:
    chapters = list(load({**CONFIG, "study": "full"}, "cuda").chapters)
    missing = [point for chapter in chapters for point in points(chapter)]
    front, pages = rendered(tmp_path, written(tmp_path / "r", [], missing), *chapters)
    questions = re.findall(r"^### (.+)$", front, re.MULTILINE)
    assert {answer(front, question) for question in questions} == {"Not measured yet."}
    assert all("easured yet" in page for page in pages.values())
