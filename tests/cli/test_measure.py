"""`lmlab measure`: a few keys in, a table and one JSON document out; mistakes are one line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from lmlab.attention import registry as attention
from lmlab.cli import keys, main, measure
from lmlab.cli.keys import KINDS, KeyValueError
from lmlab.cli.measure import point_from_words
from lmlab.jobs import run, unmeasured
from lmlab.jobs.catalog import all_points, points_of
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.study.config import Study, load
from lmlab.study.files import ROOT, SCHEMAS
from lmlab.study.points import Point
from lmlab.study.results import read

NANO = ["--config", "study=nano"]


@pytest.fixture(autouse=True)
def _quiet_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread, a lock of our own, and the project's config.yaml from wherever we stand."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run, "set_threads", lambda: torch.set_num_threads(1))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def nano(config: dict[str, Any]) -> Study:
    return load({**config, "study": "nano"}, "cpu")


@pytest.fixture(scope="module")
def full(config: dict[str, Any]) -> Study:
    return load({**config, "study": "full"}, "cuda")


def test_the_last_line_is_the_result_and_the_table_stands_above(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["size=cpu-small", "context=8", "precision=bf16", "mode=train_step", "warmup=1"]
    assert main(["measure", "end_to_end", *words, *NANO]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    jsonschema.validate(result, json.loads((SCHEMAS / "result.schema.json").read_text()))
    assert result["status"] == "ok"
    assert result["parameters"]["precision"] == "bf16"
    head = next(index for index, line in enumerate(lines) if line.startswith("phase"))
    phases = [line.split()[0] for line in lines[head + 1 : -1]]
    assert phases == ["zero_grad", "forward", "backward", "optimizer", "total"]
    assert len({len(line) for line in lines[head:-1]}) == 1  # columns are aligned


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    main(["measure", "precision", "topic=accumulation", *NANO])
    assert not list(tmp_path.rglob("*.json"))
    main(["measure", "precision", "topic=accumulation", "--out", "mine.json", *NANO])
    assert read(tmp_path / "mine.json").parameters == {"topic": "accumulation"}


def test_a_file_that_cannot_be_written_loses_no_result_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["topic=accumulation", "--out", str(tmp_path)]
    assert main(["measure", "precision", *words, *NANO]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["status"] == "ok"
    assert captured.err == f"lmlab: --out {tmp_path}: Is a directory\n"


def test_the_example_of_the_readme_is_a_point_of_the_full_study(full: Study) -> None:
    words = ["size=small", "context=128", "precision=bf16", "mode=train_step", "warmup=5"]
    assert point_from_words(full, "end_to_end", words) in points_of(full, "end_to_end")


def test_what_is_not_given_comes_from_the_study(full: Study) -> None:
    assert point_from_words(full, "end_to_end", []) == points_of(full, "end_to_end")[0]


def test_a_size_brings_its_hyper_parameters(full: Study) -> None:
    point = point_from_words(full, "end_to_end", ["size=xl"])
    assert point.parameters["size"] == "xl"
    assert [point.settings[key] for key in ("d_model", "d_ff", "num_layers", "num_heads")] == [
        *(1600, 6400, 48, 25)
    ]


def test_hyper_parameters_replace_those_of_a_size(full: Study) -> None:
    words = ["num_heads=8", "size=medium", "d_model=512", "vocab_size=50257", "rope_theta=500000"]
    point = point_from_words(full, "end_to_end", words)
    assert point.parameters["size"] == "custom"
    assert {key: point.settings[key] for key in ("d_model", "num_heads", "d_ff", "num_layers")} == {
        "d_model": 512,
        "num_heads": 8,
        "d_ff": 4096,
        "num_layers": 24,
    }
    assert point.settings["vocab_size"] == 50257
    assert point.settings["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["topic=layernorm"], {"topic": "layernorm"}),
        (["topic=autocast", "dtype=fp16"], {"topic": "autocast", "dtype": "fp16"}),
        (["dtype=fp16"], {"topic": "autocast", "dtype": "fp16"}),
        (["terms=10"], {"topic": "accumulation"}),
    ],
    ids=" ".join,
)
def test_keys_choose_the_experiment_that_has_them(
    nano: Study, words: list[str], parameters: dict[str, str]
) -> None:
    assert point_from_words(nano, "precision", words).parameters == parameters


def test_strategies_of_checkpointing_are_names_separated_by_commas(nano: Study) -> None:
    point = point_from_words(nano, "memory", ["strategies=every-1,nested"])
    assert point.parameters["topic"] == "checkpointing"
    assert point.settings["strategies"] == "every-1,nested"


def test_several_values_of_a_key_have_commas_between_them(nano: Study) -> None:
    point = point_from_words(nano, "attention", ["topic=benchmark", "arms=naive,sdpa_math"])
    assert point.settings["arms"] == ["naive", "sdpa_math"]
    tiles = point_from_words(nano, "attention", ["topic=tiles", "tiles=64x32,128x64"])
    assert tiles.settings["tiles"] == [[64, 32], [128, 64]]


def test_keys_of_two_experiments_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "precision", "topic=layernorm", "terms=3", *NANO]) == 2
    error = capsys.readouterr().err
    assert "topic=layernorm, terms=3: no point of precision has all of these" in error
    assert error.endswith("; allowed with this topic: topic, seed\n")


def test_a_chapter_that_is_switched_off_is_refused(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nano = {**config["studies"]["nano"]}
    nano["precision"] = {**nano["precision"], "enabled": False}
    changed = {**config, "study": "nano", "studies": {**config["studies"], "nano": nano}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
    assert main(["measure", "precision"]) == 2
    assert "precision is switched off in the study 'nano'" in capsys.readouterr().err


def ending(error: Exception) -> Callable[[Point, torch.device], Outcome]:
    def chapter(point: Point, device: torch.device) -> Outcome:
        raise error

    return chapter


@pytest.mark.parametrize(
    ("error", "exit_status", "line"),
    [
        (RuntimeError("broken"), 1, "failed: RuntimeError: broken"),
        (Unsupported("needs a GPU"), 0, "unsupported: needs a GPU"),
    ],
    ids=["failed", "unsupported"],
)
def test_only_a_failure_fails(
    error: Exception,
    exit_status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "load", lambda chapter: ending(error))
    assert main(["measure", "machine", *NANO]) == exit_status
    assert line in capsys.readouterr().out.splitlines()


def test_an_interrupt_ends_in_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(chapter: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load", interrupted)
    assert main(["measure", "machine", "--out", "mine.json", *NANO]) == 130
    assert capsys.readouterr().err == "lmlab: interrupted, nothing is written\n"
    assert not list(tmp_path.rglob("*.json"))


def test_every_key_of_every_point_can_be_set(config: dict[str, Any]) -> None:
    for study in config["studies"]:
        for point in all_points(load({**config, "study": study}, "cpu")):
            assert {*point.parameters, *point.settings} - {"size", "sizes"} <= set(KINDS)


def test_choices_are_those_of_the_schema() -> None:
    definitions = json.loads((SCHEMAS / "config.schema.json").read_text())["$defs"]
    dtypes = definitions["precision_chapter"]["properties"]["dtypes"]["items"]["enum"]
    assert KINDS["precision"].allowed == ", ".join(definitions["precision"]["enum"])
    assert KINDS["mode"].allowed == ", ".join(definitions["mode"]["enum"])
    assert KINDS["dtype"].allowed == ", ".join(dtypes)
    assert list(attention.VARIANTS) == definitions["variant"]["enum"]
    assert list(keys.TILE_HEIGHTS) == definitions["tile_heights"]["items"]["enum"]
    assert definitions["common"]["properties"]["seed"]["maximum"] == keys.LARGEST_SEED
    rounds = definitions["sharded_training"]["properties"]["rounds"]["minimum"]
    assert keys.KINDS_OF_RANKS["rounds"].allowed == f"an integer of at least {rounds}"
    profilers = definitions["profile"]["properties"]["profiler"]["enum"]
    assert KINDS["profiler"].allowed == ", ".join(profilers)


def test_a_point_with_ranks_is_started_by_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def stand_in(point: Point, machine: str, out: Path, torchrun: list[str]) -> int:
        asked.append(torchrun)
        words = ["--point", point.to_json(), "--out", str(out)]
        return unmeasured.main([*words, "--status", "unsupported", "--reason", "needs 4 GPUs"])

    monkeypatch.setattr(measure, "run_ranks", stand_in)
    words = ["placement=own_gpu", "world_size=4"]
    assert main(["measure", "collectives", *words, "nnodes=2", *NANO]) == 0
    assert main(["measure", "collectives", *words, *NANO]) == 0
    assert asked[0][:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]
    assert asked[1][:5] == ["torchrun", "--nnodes", "1", "--nproc-per-node", "4"]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["parameters"]["world_size"], result["reason"]) == (4, "needs 4 GPUs")


def test_ranks_that_cannot_be_started_give_their_exit_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "run_ranks", lambda *_: 143)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "collectives", *NANO])
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("word", "value"),
    [("sizes_mib=1,4", [1, 4]), ("dtypes=bf16", ["bf16"])],
)
def test_a_list_is_given_with_commas(nano: Study, word: str, value: list[Any]) -> None:
    point = point_from_words(nano, "collectives", [word])
    assert point.settings[word.partition("=")[0]] == value


@pytest.mark.parametrize(
    "word", ["sizes_mib=1,1", "sizes_mib=0", "sizes_mib=", "dtypes=fp32,fp8", "device_name="]
)
def test_a_list_with_a_wrong_value_is_refused_in_one_line(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chapter = "calculations" if word.startswith("device") else "collectives"
    assert main(["measure", chapter, word, *NANO]) == 2
    assert "allowed: " in capsys.readouterr().err


def test_sizes_that_a_job_may_choose_from_are_named(nano: Study) -> None:
    words = ["sizes=cpu-medium,cpu-small", "rounds=4"]
    point = point_from_words(nano, "data_parallel", words)
    assert [size["size"] for size in point.settings["sizes"]] == ["cpu-medium", "cpu-small"]
    assert point.settings["sizes"][1]["d_model"] == 64
    assert point.settings["rounds"] == 4
    with pytest.raises(KeyValueError, match="sizes = 'huge'; allowed: some of these"):
        point_from_words(nano, "data_parallel", ["sizes=huge"])
