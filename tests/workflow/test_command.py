"""The promised command, its other spellings, and what a user sees when something is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.workflow.conftest import COMMAND, Project, Run

pytestmark = pytest.mark.slow

SPELLINGS = {
    "as promised": COMMAND,
    "target first": "snakemake report/writeup.md --cores 1 --resources gpu=1",
    "target behind cores": "snakemake --resources gpu=1 --cores 1 report/writeup.md",
    "target behind two dashes": "snakemake --cores 1 --resources gpu=1 -- report/writeup.md",
    "no target": "snakemake --cores 1 --resources gpu=1",
    "nothing at all": "snakemake",
    "as a module of the catalog": "snakemake --cores 1 -s workflow/Snakefile",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_asks_for_the_same_jobs(fresh: Project, spelling: str) -> None:
    jobs = fresh.would_run(SPELLINGS[spelling].removeprefix("snakemake"))
    assert len(jobs["end_to_end"]) > 50, "without a GPU the tiny study is asked for"
    assert jobs["writeup"] == ["report/writeup.md"]


def test_from_another_folder_through_the_catalogs_snakefile(fresh: Project, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    jobs = fresh.would_run(f"-s workflow/Snakefile -d {elsewhere} --config study=nano")
    assert {"machine", "end_to_end", "chapter", "writeup"} <= set(jobs)


MODULE = """
configfile: "{project}/config.yaml"
module lab:
    snakefile: "{project}/workflow/Snakefile"
    config: {config}
use rule * from lab as lab_*
rule mine:
    default_target: True
    input: rules.lab_writeup.output
"""
OWN_CONFIG = '{key: value for key, value in config.items() if key != "samples"}'


def planned_by_a_user(folder: Path, snakefile: str, options: str) -> set[str]:
    """Rules that would run of a workflow that has this one as a module."""
    user = Project(folder)
    (user.folder / "Snakefile").write_text(snakefile)
    planned = user.run(f"snakemake -n --cores 1 {options}")
    return set(re.findall(r"^(?:local)?rule (\w+):$", planned.stdout + planned.stderr, re.M))


OF_THE_MODULE = {"lab_machine", "lab_end_to_end", "lab_chapter", "lab_writeup", "mine"}


@pytest.mark.parametrize(
    ("config", "option"),
    [("config", ""), (OWN_CONFIG, ' samples=["a"]')],
    ids=["the same config", "a config of its own"],
)
def test_as_a_module_of_another_workflow(
    fresh: Project, tmp_path: Path, config: str, option: str
) -> None:
    snakefile = MODULE.format(project=fresh.folder, config=config)
    assert planned_by_a_user(tmp_path, snakefile, f"--config study=nano{option}") >= OF_THE_MODULE


def test_numbers_inside_of_a_mapping_on_the_command_line(fresh: Project) -> None:
    def asking(block: str) -> str:
        return f'--config study=nano studies={{"nano":{{"end_to_end":{block}}}}}'

    assert "end_to_end" not in fresh.would_run(asking('{"enabled":false}'))
    widened = fresh.would_run(asking('{"contexts":[16,24,32]}'))["end_to_end"]
    assert len([output for output in widened if "context~24" in output]) > 0
    wrong = fresh.run("snakemake -n " + asking('{"steps":"x"}'), check=False)
    assert wrong.stderr.splitlines()[-1] == (
        'config: studies.nano.end_to_end.steps = "x"; allowed: one integer of at least 1'
    )


def test_the_nano_study_gives_a_page_with_its_figures(measured_once: Project) -> None:
    page = (measured_once.folder / "report/writeup.md").read_text()
    figures = list((measured_once.folder / "report/figures").rglob("*.svg"))
    assert figures
    for figure in figures:
        assert figure.with_suffix(".png").exists()
        assert (
            figure.relative_to(measured_once.folder / "report").with_suffix("").as_posix() in page
        )


def test_parsing_the_workflow_imports_no_torch(fresh: Project) -> None:
    (fresh.folder / "trap" / "torch").mkdir(parents=True)
    (fresh.folder / "trap" / "torch" / "__init__.py").write_text("raise SystemExit('torch!')\n")
    trapped = f"{fresh.folder / 'trap'}:{fresh.folder / 'src'}"
    done = fresh.run("snakemake -n --config study=full", PYTHONPATH=trapped)
    assert "torch!" not in done.stderr


def test_progress_is_plain_lines_in_a_log(first_run: Run) -> None:
    lines = [line for line in first_run.stderr.splitlines() if line.startswith("[")]
    assert any("end_to_end size=cpu-small" in line and " ms" in line for line in lines)
    assert any("left, about" in line for line in lines)
    assert "\r" not in first_run.stderr


WRONG_CONFIG = {
    "unknown study": ("--config study=huge", 'study = "huge"; allowed: auto, full, tiny, nano'),
    "unknown key": ("--config stduy=tiny", "stduy is not a key"),
    "unknown model": ("--config model=nope.mod:Net", "model = 'nope.mod:Net': module 'nope.mod'"),
    "a class that is not there": ("--config model=lmlab.study:Net", "there is no 'Net' in"),
    "machine without results": ("--config machine=nosuch", "machine = 'nosuch' has no results"),
    "machine with a slash": ("--config machine=a/b", 'machine = "a/b"'),
}


@pytest.mark.parametrize("case", WRONG_CONFIG)
def test_a_wrong_config_ends_in_one_line_before_any_job(fresh: Project, case: str) -> None:
    options, complaint = WRONG_CONFIG[case]
    done = fresh.run(f"snakemake {options}", check=False)
    assert done.returncode != 0
    snakemakes_own = ("Using workflow specific profile", "Config file")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(snakemakes_own)]
    assert len(lines) == 1, done.stderr
    assert complaint in lines[0]
    assert not (fresh.folder / "results").exists()


WRONG_FILE = {
    "wrong heads": ("num_heads: 12}", "num_heads: 7}", "sizes.small.num_heads = 7"),
    "a key twice": (
        "machine: auto",
        "machine: auto\nmachine: mine",
        "config.yaml, line 6: 'machine' is given twice; allowed: each key once",
    ),
}


@pytest.mark.parametrize("case", WRONG_FILE)
def test_a_mistake_in_the_file_ends_in_one_line(fresh: Project, case: str) -> None:
    old, new, complaint = WRONG_FILE[case]
    fresh.edit("config.yaml", old, new)
    done = fresh.run("snakemake", check=False)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["    config: " + OWN_CONFIG, ""], ids=["given", "shared"])
def test_keys_of_the_workflow_that_has_this_as_a_module_are_its_own(
    fresh: Project, tmp_path: Path, given: str
) -> None:
    snakefile = MODULE.format(project=fresh.folder, config=None).replace("    config: None", given)
    (tmp_path / "mine.yaml").write_text("study: tiny\nstudy: nano\n")
    planned = planned_by_a_user(tmp_path, 'configfile: "mine.yaml"\n' + snakefile, "")
    assert planned >= OF_THE_MODULE


def test_a_model_of_the_users_own_is_measured_and_counted_as_code(measured: Project) -> None:
    measured.only("end_to_end", "memory")
    package = measured.folder / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(
        "from lmlab.model.transformer import TransformerLM\n\n\n"
        "class Net(TransformerLM):\n    pass\n"
    )
    options = "--config study=nano model=mine.net:Net"
    ours = measured.results()
    measured.run(f"snakemake {options}")
    assert ours.items() <= measured.results().items(), "the results of our own model stay"
    files = [*(measured.folder / "results").rglob("end_to_end/**/own_model~*/*.json")]
    assert files
    assert {json.loads(f.read_text())["settings"]["model"] for f in files} == {"mine.net:Net"}
    assert measured.measures(options) == []
    measured.edit("mine/net.py", "    pass\n", "    depth = 1\n")
    stale = {Path(out).parts[2] for out in measured.measures(options)}
    assert stale == {"end_to_end", "memory"}
