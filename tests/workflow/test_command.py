"""The main command, other ways to run the workflow, and what a user sees."""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from lmlab.jobs.launch import usable_cores
from tests.workflow.conftest import COLD, COMMAND, MACHINE, NANO, NETWORK_LOG, Project

pytestmark = pytest.mark.slow

CHAPTERS = {
    *("machine", "end_to_end", "profile", "memory", "precision", "attention", "collectives"),
    *("data_parallel", "calculations", "fastest_step", "principles"),
}


def test_the_study_gives_every_page_and_every_linked_figure(first_run: Project) -> None:
    report = first_run.folder / "report"
    pages = [report / "writeup.md", report / "index.md"]
    pages += [report / "chapters" / f"{chapter}.md" for chapter in CHAPTERS]
    links = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", page.read_text())
    }
    assert links
    assert all(link.exists() for link in links)
    results = first_run.results()
    assert len(results) == 28
    text, _ = results[f"results/{MACHINE}/collectives/placement~cpu/world_size~2.json"]
    result = json.loads(text)
    if usable_cores() < 2:
        assert result["status"] == "unsupported"
    else:
        ranks = result["data"]["ranks"]
        assert (ranks["backend"], ranks["world_size"]) == ("gloo", 2)


def test_nothing_is_fetched_from_another_host(first_run: Project) -> None:
    probe = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    (first_run.folder.parent / "probe.py").write_text(probe)
    assert not (first_run.folder / NETWORK_LOG).exists(), "by the whole study and its report"
    Project(first_run.folder.parent).run(f"{sys.executable} probe.py", check=False)
    assert "192.0.2.1" in (first_run.folder.parent / NETWORK_LOG).read_text(), "it would be seen"


def test_snakemakes_own_report_holds_pages_and_figures(measured: Project) -> None:
    measured.run(f"snakemake {NANO} --report report.zip")
    with zipfile.ZipFile(measured.folder / "report.zip") as archive:
        names = {Path(name).name for name in archive.namelist()}
    assert {"writeup.md", *(f"{chapter}.md" for chapter in CHAPTERS)} <= names
    drawn = {figure.name for figure in (measured.folder / "report/figures").rglob("*.png")}
    assert drawn
    assert drawn <= names


def test_the_machine_is_measured_first_and_progress_is_plain_lines(first_run: Project) -> None:
    log = (first_run.folder.parent / "run.log").read_text()
    lines = re.findall(r"^\[ *\d+/29\] .*$", log, re.M)
    assert lines[0].startswith("[ 1/29] machine: ")
    assert "28 left, about " in lines[0]
    assert any("end_to_end size=cpu-small context=16" in line for line in lines)
    assert "\r" not in log


def test_a_second_run_has_nothing_to_do(measured: Project) -> None:
    measured.replace("config.yaml", "study: auto", "study: nano")
    assert "Nothing to be done" in measured.run(COMMAND).stderr


def test_a_study_in_its_own_folder_is_planned_without_torch(fresh: Project, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (trap / "torch").mkdir(parents=True)
    (trap / "torch" / "__init__.py").write_text("raise SystemExit('torch!')\n")
    options = f"-s workflow/Snakefile --directory {tmp_path} --config study=full"
    jobs = fresh.plan(options, PYTHONPATH=f"{trap}:{fresh.folder / 'src'}")
    assert jobs["report"] == ["report/writeup.md"]
    assert len(jobs["end_to_end"]) > 100
    assert set(jobs) == {*CHAPTERS, "sharded_optimizer", "fsdp", "report", "study"}


MODULE = """
configfile: "{project}/config.yaml"
configfile: "mine.yaml"
module lab:
    snakefile: "{project}/workflow/Snakefile"
    config: {{key: value for key, value in config.items() if key != "samples"}}
use rule * from lab as lab_*
rule mine:
    default_target: True
    input: rules.lab_report.output
"""


def test_as_a_module_of_another_workflow(fresh: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("samples: [a]\nstudy: tiny\nstudy: nano\n")
    (tmp_path / "Snakefile").write_text(MODULE.format(project=fresh.folder))
    jobs = Project(tmp_path).plan("--cores 1", PYTHONPATH=str(fresh.folder / "src"))
    assert set(jobs) == {"mine", "lab_report", *(f"lab_{chapter}" for chapter in CHAPTERS)}


WRONG = {
    "a duplicate key": (
        "machine: auto",
        "machine: auto\nmachine: mine",
        "config.yaml, line 6: 'machine' is given twice; allowed: each key once",
    ),
    "a model that is not there": ("TransformerLM", "Net", "there is no 'Net' in"),
}


@pytest.mark.parametrize(("old", "new", "complaint"), WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_one_line(fresh: Project, old: str, new: str, complaint: str) -> None:
    fresh.replace("config.yaml", old, new)
    done = fresh.run("snakemake", check=False)
    assert done.returncode != 0
    own = ("Using workflow specific profile", "Config file")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    assert len(lines) == 1, done.stderr
    assert complaint in lines[0]


def test_results_that_cannot_be_written_end_in_one_line_before_any_job(fresh: Project) -> None:
    (fresh.folder / "results").touch()
    done = fresh.run(f"snakemake {NANO}", check=False)
    assert done.returncode != 0
    path = f"{fresh.folder / 'results'}: "
    assert sum(line.startswith(path) for line in done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (fresh.folder / "logs").exists()


def test_values_inside_a_mapping_on_the_command_line_have_their_types(fresh: Project) -> None:
    block = '{"contexts":[16,24],"steps":2,"modes":["forward"],"precisions":["fp32"]}'
    jobs = fresh.plan(f'{NANO} studies={{"nano":{{"end_to_end":{block}}}}}')
    warm = [output for output in jobs["end_to_end"] if "start~warm" in output]
    assert len(warm) == 2


ATTENTION = "from lmlab.attention.naive import attention as mine\n"
MODEL = """
from lmlab.model.transformer import TransformerLM


class Net(TransformerLM):
    pass
"""


def test_a_users_own_model_and_attention_are_measured_and_count_as_code(measured: Project) -> None:
    grid = {"precisions": ["fp32"], "cold_start": COLD}
    measured.configure("end_to_end", common={"attention": "own.attend:mine"}, end_to_end=grid)
    (measured.folder / "own").mkdir()
    for name, text in (("__init__", ""), ("net", MODEL), ("attend", ATTENTION)):
        (measured.folder / "own" / f"{name}.py").write_text(text)
    before = measured.results()
    options = f"{NANO} model=own.net:Net"
    measured.run(f"snakemake {options}")
    assert before.items() <= measured.results().items(), "results of our own model stay"
    added = [json.loads(text) for path, (text, _) in measured.results().items() if "own" in path]
    assert len(added) == 2
    assert {result["settings"]["model"] for result in added} == {"own.net:Net"}
    assert {result["parameters"]["attention"] for result in added} == {"own.attend:mine"}
    measured.append("own/attend.py", "\nCHANGED = 1\n")
    assert set(measured.plan(options)) == {"end_to_end", "report"}
