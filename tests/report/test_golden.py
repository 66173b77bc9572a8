"""Golden pages: the committed H200 report and a small CPU study, Markdown byte for byte.

After a change that is meant to alter pages: `make example` for the first, and
`LMLAB_UPDATE_GOLDEN=1 pytest tests/report/test_golden.py` for the second; then review the diff.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import pytest

from lmlab.report.text import slug
from lmlab.study.files import ROOT, TEMPLATES
from tests.processes import files_in_git
from tests.project import GOLDEN_RESULTS, config, report

GOLDEN = ROOT / "tests" / "golden"
H200 = Path("docs/nvidia-h200")
WORDS = 5000
MARKDOWN_BYTES, FIGURE_BYTES, EXPLORER_BYTES = 200_000, 300_000, 5_000_000
BULLET_WORDS, ANSWER_SENTENCES, TABLE_ROWS = 120, 2, 10
LINK = re.compile(r"!?\[[^\]]*\]\(([^)]+)\)")


def render(folder: Path, results: Path, machine: str, device: str, study: str, out: str) -> Path:
    """The report as the workflow writes it, from a folder that links to the results."""
    (folder / "results").symlink_to(results)
    with contextlib.chdir(folder):
        faults = report(config(study=study), machine, device, Path("results"), Path(out))
    assert faults == []
    return folder / out


def pages(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")}


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("h200")
    return render(folder, ROOT / "results", "nvidia-h200", "cuda", "full", str(H200))


def test_the_committed_report_is_what_the_results_give(h200: Path) -> None:
    assert pages(h200) == pages(ROOT / H200)


def test_figures_that_pages_link_to_are_drawn_and_no_others_are_committed(h200: Path) -> None:
    drawn = {str(path.relative_to(h200)) for path in h200.rglob("*.png")}
    committed = {str(path.relative_to(ROOT / H200)) for path in (ROOT / H200).rglob("*.png")}
    assert drawn == committed


def test_a_small_cpu_study(tmp_path: Path) -> None:
    made = render(tmp_path, GOLDEN / "results", "cpu-golden", "cpu", "nano", "report")
    if os.environ.get("LMLAB_UPDATE_GOLDEN"):
        shutil.rmtree(GOLDEN / "report", ignore_errors=True)
        for name, text in pages(made).items():
            (GOLDEN / "report" / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / "report" / name).write_text(text)
    assert pages(made) == pages(GOLDEN / "report")


@pytest.mark.parametrize("chapter", ["machine", "end_to_end", "attention"])
def test_a_chapter_without_results_costs_no_other_part(tmp_path: Path, chapter: str) -> None:
    shutil.copytree(GOLDEN_RESULTS, tmp_path / "less" / "cpu-golden")
    for path in (tmp_path / "less" / "cpu-golden").glob(f"{chapter}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert render(tmp_path, tmp_path / "less", "cpu-golden", "cpu", "nano", "report").exists()


def test_the_front_page_is_short() -> None:
    front = (ROOT / H200 / "writeup.md").read_text()
    assert len(front.split()) <= WORDS
    first, *sections = front.split("\n### ")
    bullets = [line for line in first.splitlines() if line.startswith("- ")]
    assert len(bullets) == 5
    assert sum(len(line.split()) - 1 for line in bullets) <= BULLET_WORDS
    for section in sections:
        question = section.splitlines()[0]
        rows = [line for line in section.splitlines() if line.startswith("|")]
        rules = [line for line in rows if set(line) <= set("|-: ")]
        answer = section.split("\n\n")[1]
        assert answer.startswith("**"), question
        assert len(re.split(r"(?<=[.?!]) ", answer)) <= ANSWER_SENTENCES, question
        assert len(rules) <= 1, question
        assert len(rows) <= TABLE_ROWS + 2, question
        assert section.count("![") <= 1, question


def test_files_are_small_enough_to_review() -> None:
    limits = {".md": MARKDOWN_BYTES, ".png": FIGURE_BYTES, ".html": EXPLORER_BYTES}
    for path in (ROOT / H200).rglob("*.*"):
        assert path.stat().st_size <= limits.get(path.suffix, 0), path


def test_every_link_leads_to_a_file_in_git() -> None:
    files = set(files_in_git())
    if not files:
        pytest.skip("not a git checkout")
    folders = {parent for file in files for parent in file.parents}
    for page in [*(ROOT / H200).rglob("*.md"), ROOT / "README.md"]:
        for link in LINK.findall(page.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target in files or target in folders, f"{page}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                assert anchor in {slug(heading) for heading in headings}, f"{page}: {link}"


def test_the_index_has_an_answer_for_every_section_that_it_names() -> None:
    named = re.findall(r'"([\w/]+\.md#[\w-]+)"', (TEMPLATES / "index.md.j2").read_text())
    assert len(named) > 20
    assert set(named) <= set(LINK.findall((ROOT / H200 / "index.md").read_text()))


def test_the_numbers_of_the_readme_are_in_the_report() -> None:
    quoted = re.search(r"^On that H200.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    pages = "".join(page.read_text() for page in (ROOT / H200).rglob("*.md"))
    assert quoted is not None
    for number in re.findall(r"\d+ of \d+|(?<!\w)\d[\d,]+\d", quoted[0]):
        assert re.search(rf"(?<![\w,.]){number}(?![\w,.]\d)", pages), number
