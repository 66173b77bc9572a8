"""Keys of a point on the command line: their values, and one line for every mistake."""

from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import main
from lmlab.cli.keys import read_config, read_value, schemas_for
from lmlab.cli.measure import point_from_args
from lmlab.jobs.catalog import points_of
from tests import project
from tests.project import H200_RESULTS

NANO, FULL = project.study("nano"), project.study("full", "cuda")


def test_every_value_of_every_point_is_allowed_for_its_key() -> None:
    """What the studies themselves measure can be asked for by hand."""
    for name in project.config()["studies"]:
        study = project.study(name)
        for chapter in study.chapters:
            points = points_of(study, chapter)
            schemas = schemas_for(points, study)
            for point in points:
                for key, value in {**point.parameters, **point.settings}.items():
                    if key not in ("sizes", "tiles"):
                        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                        text = text.lower() if isinstance(value, bool) else text
                        expected = value.split(",") if key == "strategies" else value
                        assert read_value(key, text, schemas[key]) == expected


VALUES = {
    "a list": ("collectives", "sizes_mib=1,4", "sizes_mib", [1, 4]),
    "one's own variant": ("attention", "variants=mine.fast:f", "variants", ["mine.fast:f"]),
    "tiles": ("attention", "tiles=64x32,128x64", "tiles", [[64, 32], [128, 64]]),
    "strategies": ("memory", "strategies=every-1,nested", "strategies", "every-1,nested"),
    "of a nested block": ("calculations", "device_name=TPU", "device_name", "TPU"),
}


@pytest.mark.parametrize(("chapter", "argument", "key", "value"), VALUES.values(), ids=VALUES)
def test_a_text_becomes_a_value(chapter: str, argument: str, key: str, value: object) -> None:
    assert point_from_args(NANO, chapter, [argument]).settings[key] == value


def test_sizes_that_a_job_may_choose_from_come_with_their_shapes() -> None:
    point = point_from_args(NANO, "data_parallel", ["sizes=cpu-medium,cpu-small", "rounds=4"])
    assert [size["size"] for size in point.settings["sizes"]] == ["cpu-medium", "cpu-small"]
    assert point.settings["sizes"][1]["d_model"] == 64


def test_what_is_not_given_comes_from_the_study() -> None:
    assert point_from_args(FULL, "end_to_end", []) == points_of(FULL, "end_to_end")[0]
    args = ["size=small", "context=128", "precision=bf16", "mode=train_step", "warmup=5"]
    assert point_from_args(FULL, "end_to_end", args) in points_of(FULL, "end_to_end")


def test_hyper_parameters_replace_those_of_a_size() -> None:
    point = point_from_args(FULL, "end_to_end", ["num_heads=8", "size=medium", "d_model=512"])
    assert point.parameters["size"] == "custom"
    shape = {key: point.settings[key] for key in ("d_model", "num_heads", "d_ff", "num_layers")}
    assert shape == {"d_model": 512, "num_heads": 8, "d_ff": 4096, "num_layers": 24}


@pytest.mark.parametrize(
    ("args", "parameters"),
    [
        (["topic=layernorm"], {"topic": "layernorm"}),
        (["dtype=fp16"], {"topic": "autocast", "dtype": "fp16"}),
        (["terms=10"], {"topic": "accumulation"}),
    ],
    ids=" ".join,
)
def test_keys_choose_experiments(args: list[str], parameters: dict[str, str]) -> None:
    assert point_from_args(NANO, "precision", args).parameters == parameters


WRONG = {
    "end_to_end contxt=128": "contxt = '128': no such key; allowed: size, con",
    "attention arms=naive": "arms is now called variants",
    "end_to_end context": "'context' is not key=value",
    "end_to_end context=16 context=32": "context = '32': given before",
    "end_to_end size=huge": "size = 'huge'; allowed: small, medium",
    "end_to_end context=long": "context = 'long'; allowed: one integer of at",
    "attention variants=naive,magic": "'naive,magic'; allowed: naive",
    "attention tiles=128": "tiles = '128'; allowed: rows x columns",
    "attention tiles=3x5": "each of 16, 32, 64, 128, 256",
    "precision topic=tiles": "allowed: accumulation, autocast",
    "precision topic=layernorm terms=3": "has all of these; allowed with this topic: topic, seed",
    "end_to_end model=Mine": "model = 'Mine'; allowed: an import path",
    "end_to_end model=nowhere:M": "model = 'nowhere:M': module 'nowhere' is not",
    "end_to_end model=lmlab.model.transformer:GPT": "there is no 'GPT' in ",
    "attention variants=nowhere:f": "variants = 'nowhere:f': module 'nowh",
    "memory strategies=none,sqrt": "allowed: none, nested, or every-K",
    "end_to_end num_heads=3": "num_heads: 3 does not divide d_mo",
    "collectives world_size=3 nnodes=2": "world_size = 3; allowed: multiples of nnodes = 2",
    "end_to_end model=slip:Net": "slip.py, line 1: invalid syntax",
}


STEPS = H200_RESULTS / "end_to_end" / "size~small"
COMMANDS = {f"measure {args} --config study=nano": message for args, message in WRONG.items()} | {
    "measure end_to_end --config study=nano steps=5": "a point's own values come before --config",
    'measure memory --config study=nano studies={"nano":{"memory":{"enabled":false}}}': "switched",
    "status --config study=huge": 'study = "huge"',
    "status --config study": "'study' is not key=value",
    "status --machine nosuch": "machine = 'nosuch' has no results",
    "status --config model=no:Net": "model = 'no:Net': module 'no'",
    "status --configfile no.yaml": "no.yaml: not a readable",
    "check nowhere --ignore everything": "everything",
    f"compare nowhere {H200_RESULTS}": "nowhere",
    f"compare {H200_RESULTS}:no-such-revision {H200_RESULTS}": "no-such-revision",
    f"compare nowhere:HEAD {H200_RESULTS}": "nowhere",
    f"compare . {H200_RESULTS}": "",
    f"compare {H200_RESULTS} {H200_RESULTS} --where size": "size",
    f"compare {STEPS} {STEPS} --where sizee=small": "sizee = 'small': no record has this; allowed",
    f"compare {STEPS} {STEPS} --where size=small,tiny": "size = 'tiny': no record has this; allow",
}


@pytest.mark.parametrize(("command", "message"), COMMANDS.items())
def test_a_mistake_ends_in_one_line(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slip.py").write_text("class Net(:\n")
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


RANKS = {"nnodes": 1, "rdzv_backend": "c10d"}
TWO_NODES = {"nnodes": 2, "rdzv_backend": "c10d"}
MERGED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nothing": ([], {"study": "auto", "ranks": RANKS}),
    "a key": (["study=nano"], {"study": "nano", "ranks": RANKS}),
    "a part of a mapping": (["ranks={nnodes: 2}"], {"study": "auto", "ranks": TWO_NODES}),
    "a value in place of a mapping": (["ranks=3"], {"study": "auto", "ranks": 3}),
}


@pytest.mark.parametrize(("overrides", "merged"), MERGED.values(), ids=MERGED)
def test_overrides_merge(
    overrides: list[str], merged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("study: auto\nranks: {nnodes: 1, rdzv_backend: c10d}\n")
    Path("mine.yaml").write_text("study: tiny\nranks: {nnodes: 3}\n")
    assert read_config(None, overrides) == merged
    # A file lies between config.yaml and what is given on the command line.
    assert read_config(Path("mine.yaml"), ["study=nano"]) == {
        "study": "nano",
        "ranks": {**RANKS, "nnodes": 3},
    }
