"""A wrong configuration ends in one line that names the key, the value and what is allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snakemake.cli import parse_config

from lmlab.attention.registry import VARIANTS
from lmlab.jobs.catalog import all_points, points_of
from lmlab.study.config import load
from lmlab.study.config_file import read, typed
from lmlab.study.files import ROOT
from tests import project

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    return project.config()


def _end_to_end(**changes: Any) -> Callable[[Config], None]:
    return lambda config: config["studies"]["nano"]["end_to_end"].update(changes)


WRONG = {
    "unknown study": (lambda c: c.update(study="huge"), 'study = "huge"', "auto, full, tiny, nano"),
    "unknown size": (_end_to_end(sizes=["huge"]), "end_to_end.sizes names 'huge'", "small, medium"),
    "unknown key": (_end_to_end(contextz=[4]), "end_to_end.contextz is not a key", "contexts"),
    "a number where a list belongs": (_end_to_end(contexts=4), "contexts = 4", "a list"),
    "a size named by a number": (lambda c: c["sizes"].update({7: {}}), "sizes.7", "quote it"),
    "a report folder with a slash": (lambda c: c.update(report="out/"), 'report = "out/"', "slash"),
    "this folder as the report": (lambda c: c.update(report="."), 'report = "."', "below this one"),
    "a key of an earlier version": (
        lambda c: c["studies"]["nano"]["attention"]["benchmark"].update(arms=["naive"]),
        "benchmark.arms",
        "is now called variants",
    ),
    "heads that do not divide": (
        lambda c: c["sizes"]["small"].update(num_heads=7),
        "sizes.small.num_heads = 7",
        "heads of even width at d_model = 768; allowed: 1, 2, 3",
    ),
    "heads of odd width": (
        lambda c: c["sizes"]["small"].update(d_model=9, num_heads=3),
        "sizes.small.num_heads = 3",
        "heads of even width at d_model = 9; allowed: an even d_model",
    ),
    "a missing key": (lambda c: c.pop("model"), "model is missing", ""),
    "a model without a class": (lambda c: c.update(model="mine"), 'model = "mine"', "module:Class"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configuration_is_named_in_one_line(name: str, config: Config) -> None:
    spoil, complaint, allowed = WRONG[name]
    spoil(config)
    with pytest.raises(ValueError, match=rf"\A[^\n]*{complaint}[^\n]*{allowed}[^\n]*\Z"):
        load(config, "cpu")


TAKEN = {
    **dict.fromkeys(("README.md", "README.md/page"), "leads to a file"),
    **dict.fromkeys(
        ("src", "src/mine", "rules", "tests", "docs", "report/templates", "results", "logs"),
        "is taken by the project",
    ),
}


@pytest.mark.parametrize(("report", "fault"), TAKEN.items(), ids=TAKEN)
def test_a_report_is_not_written_among_other_files(
    report: str, fault: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    line = rf'\Aconfig: report = "{report}" {fault}; allowed: [^\n]+\Z'
    with pytest.raises(ValueError, match=line):
        load({**config, "report": report}, "cpu")


def test_only_folders_of_a_run_are_taken_outside_of_the_checkout(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load({**config, "report": "docs"}, "cpu")
    for taken in ("results", ".git"):
        with pytest.raises(ValueError, match="is taken by the project"):
            load({**config, "report": taken}, "cpu")


def test_every_study_has_every_chapter(config: Config) -> None:
    studies = {name: load({**config, "study": name}, "cpu") for name in config["studies"]}
    chapters = {name: set(study.chapters) for name, study in studies.items()}
    assert chapters["tiny"] == chapters["full"]
    # Of the chapters that train on several ranks, which take seconds to start, nano has one.
    assert chapters["full"] - chapters["nano"] == {"sharded_optimizer", "fsdp"}


def test_a_number_is_the_same_with_and_without_a_point(config: Config) -> None:
    before = [point.to_json() for point in all_points(load(config, "cpu"))]
    config["studies"]["tiny"]["common"].update(rope_theta=10000, time_cap_s=6.0)
    assert [point.to_json() for point in all_points(load(config, "cpu"))] == before


def test_a_model_of_the_users_own_has_paths_of_its_own(config: Config) -> None:
    ours = load(config, "cpu")
    theirs = load({**config, "model": "mine.net:Net"}, "cpu")
    paths = [
        {point.path(Path("results"), "m") for point in points_of(study, "end_to_end")}
        for study in (ours, theirs)
    ]
    assert not paths[0] & paths[1]
    assert all("own_model~mine.net.Net" in str(path) for path in paths[1])


def test_no_two_points_share_a_path(config: Config) -> None:
    for name in config["studies"]:
        points = all_points(load({**config, "study": name}, "cpu"))
        paths = {point.path(Path("results"), "m") for point in points}
        assert len(paths) == len(points)


def test_every_attention_variant_and_ones_own_can_be_named(config: Config) -> None:
    for name in (*VARIANTS, "mine.attention:fast"):
        config["studies"]["tiny"]["common"]["attention"] = name
        points = points_of(load(config, "cpu"), "end_to_end")
        assert {point.parameters["attention"] for point in points} == {name}
        assert f"attention~{name.replace(':', '.')}/" in str(points[0].path(Path("results"), "m"))


TYPED = {
    "{a: {b: 4}}": {"a": {"b": 4}},
    "{a: {b: 0.5, c: false}}": {"a": {"b": 0.5, "c": False}},
    "[1, two, 3.0]": [1, "two", 3.0],
    "{size: 2.7b}": {"size": "2.7b"},
    '{a: "b: c: d"}': {"a": "b: c: d"},
}


@pytest.mark.parametrize("text", TYPED)
def test_values_inside_snakemakes_overrides_get_their_types(text: str) -> None:
    given = parse_config([f"key={text}", "study=nano", "seed=4"])
    assert typed(given) == {"key": TYPED[text]}


UNREADABLE = {
    "no text": (b"\xff\xfe\x00", "not a readable YAML file"),
    "no end": (b"a: [1", "not a readable YAML file"),
    "no depth": (b"a: " + b"[" * 500, "more than 20 levels"),
    "a tab": (b"\ta: 1", "not a readable YAML file"),
    "empty": (b"", "allowed: keys and values"),
    "a list": (b"- 1", "allowed: keys and values"),
    "a key twice": (b"sizes:\n  mine: {d: 6}\n  mine: {d: 3}\n", "line 3: 'mine' is given twice"),
}


@pytest.mark.parametrize(("content", "complaint"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unclear_file_is_one_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"\A[^\n]*mine.yaml[^\n]*{complaint}[^\n]*\Z"):
        read(file)


def test_json_may_have_tabs_and_a_merged_mapping_be_changed_in_part(tmp_path: Path) -> None:
    texts = {
        "mine.json": '{"last":\n\t{"x":\t1, "y": 2}}\n',
        "mine.yaml": "base: &base {x: 1, y: 1}\nlast: {<<: *base, y: 2}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name)["last"] == {"x": 1, "y": 2}
