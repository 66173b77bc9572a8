"""From results to the page: whole, the same every time, and without torch."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from lmlab.study.chapters import GRIDS, points_of
from lmlab.study.config import load
from lmlab.study.files import ROOT, TEMPLATES
from lmlab.writeup.build import build
from lmlab.writeup.page import PageError, render, write_page
from lmlab.writeup.registry import chapter_fingerprint, module_of, page_fingerprint
from tests.writeup import factory, synthetic

CHAPTERS = list(GRIDS)
SMALL = {"sizes": ["small", "2.7b"], "contexts": [128, 1024], "modes": ["forward", "train_step"]}
KERNEL = "void f<float, 4>(T*, __half|int) `x` $y$ failed at size~small/context~128"


def small_config() -> dict[str, object]:
    """The full study at its corners: every branch of the page, a tenth of the drawing."""
    values = factory.config(study="full")
    values["studies"]["full"]["end_to_end"].update(SMALL)
    corners = {key: SMALL[key] for key in ("sizes", "contexts")}
    values["studies"]["full"]["profile"].update(corners)
    values["studies"]["full"]["memory"].update(corners)
    attention = values["studies"]["full"]["attention"]
    for topic in ("naive", "benchmark"):
        attention[topic].update(head_dims=[64, 128], sequences=[1024, 16384])
    return values


def write_results(root: Path) -> Path:
    """Results with one point out of memory, one failed with an ugly name, some flagged."""
    for chapter, make in synthetic.MAKERS.items():
        for point in points_of(load(small_config(), "cuda"), chapter):
            p, result = point.parameters, make(point, "cuda")
            if p.get("size") == "2.7b" and p["context"] == 1024 and p.get("mode") == "train_step":
                if p["precision"] == "fp32":
                    result = factory.failed(point, "oom", "tried to allocate 20.5 GiB")
                else:
                    result = factory.failed(point, "failed", KERNEL)
            if p.get("start") == "cold" and p.get("warmup") == 2:
                continue
            if p.get("start") == "cold":
                result = factory.result(
                    point, measurements=result.measurements, data=result.data, flags=("noisy",)
                )
            result.write(point.path(root / "results", "nvidia-h200"))
    return root / "results"


def make_page(results: Path, report: Path) -> None:
    """The page, made in this process."""
    documents = [report / "chapters" / f"{chapter}.json" for chapter in CHAPTERS]
    for chapter, out in zip(CHAPTERS, documents, strict=True):
        build(
            small_config(), chapter, machine="nvidia-h200", device="cuda",
            results=results, figures=report / "figures" / chapter, out=out,
        )  # fmt: skip
    write_page(documents, templates=TEMPLATES, out=report / "writeup.md")


def make_page_by_scripts(results: Path, report: Path) -> None:
    """The same as the workflow's two rules do it, a process each."""
    documents = [report / "chapters" / f"{chapter}.json" for chapter in CHAPTERS]
    for chapter, out in zip(CHAPTERS, documents, strict=True):
        run_script(
            "chapter.py", "--config", json.dumps(small_config()), "--chapter", chapter,
            "--machine", "nvidia-h200", "--device", "cuda", "--results", results,
            "--figures", report / "figures" / chapter, "--out", out,
        )  # fmt: skip
    page = report / "writeup.md"
    templates = sorted(TEMPLATES.glob("*.md.j2"))
    run_script("writeup.py", "--chapters", *documents, "--templates", *templates, "--out", page)


def run_script(name: str, *words: str | Path) -> None:
    subprocess.run([sys.executable, ROOT / "workflow" / "scripts" / name, *words], check=True)


def digests(report: Path) -> dict[str, str]:
    return {
        path.relative_to(report).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(report.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    write_results(path)
    make_page(path / "results", path / "report")
    return path


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "report" / "writeup.md").read_text()


@pytest.fixture(scope="module")
def html(page: str) -> str:
    return MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(page)


@pytest.mark.slow
def test_rendered_in_other_processes_every_byte_is_the_same(root: Path, tmp_path: Path) -> None:
    make_page_by_scripts(root / "results", tmp_path / "elsewhere" / "report")
    again = digests(tmp_path / "elsewhere" / "report")
    assert again == digests(root / "report")
    assert sum(name.endswith(".svg") for name in again) == sum(
        name.endswith(".png") for name in again
    )


def test_every_picture_exists_and_every_anchor_leads_somewhere(page: str, root: Path) -> None:
    pictures = re.findall(r"\((figures/[^)]+)\)", page)
    drawn = (root / "report" / "figures").glob("*/*.*")
    assert {root / "report" / picture for picture in pictures} == set(drawn)
    assert all((root / "report" / picture).stat().st_size > 1000 for picture in pictures)
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= headings


def test_an_ugly_reason_reaches_the_reader_whole(html: str) -> None:
    shown = KERNEL.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td>{shown}</td>" in html


def test_statuses_stand_in_their_cells_and_in_the_appendix(page: str) -> None:
    assert re.search(r"^\| 2\.7b +\| +1024 \|.*\| +OOM \|", page, re.MULTILINE)
    appendix = page.split("## Appendix")[1]
    assert "tried to allocate 20.5 GiB" in appendix
    assert "`end_to_end size=2.7b context=1024 batch=4 precision=fp32 mode=train_step" in appendix
    assert "not measured" in page
    assert "warmup~2/start~cold.json" in appendix, "points that were not measured"
    assert "| `noisy` | the middle half of the samples" in appendix
    assert factory.COMMIT in appendix


def test_the_opening_counts_what_is_missing(page: str, root: Path) -> None:
    results = [json.loads(file.read_text()) for file in (root / "results").rglob("*.json")]
    without_number = sum(result["status"] != "ok" for result in results)
    assert without_number > 2
    words = f"{without_number} points ended without a number, 2 points were not measured and "
    assert words in page.split("## Contents")[0]


def test_a_mean_has_its_deviation_and_its_median_beside_it(page: str, root: Path) -> None:
    documents = [json.loads(path.read_text()) for path in (root / "report/chapters").iterdir()]
    rows = [row for d in documents for table in d["tables"].values() for row in table["rows"]]
    deviating = [cell for row in rows for cell in row if " ± " in cell]
    assert deviating
    assert all(re.search(r" ± \S+ \(\S+\)", cell) for cell in deviating)
    assert "A cell with ± is a mean and its sample standard deviation and, in brackets" in page
    assert len(deviating) < sum(map(len, rows)), "so it cannot be said of every table"


def test_cases_that_were_cut_are_counted_in_the_opening_and_explained(page: str) -> None:
    opening, rest = page.split("## Contents")
    assert "exchanges between ranks were not begun for want of time" in opening
    assert "no time (not begun, since its job's time was up)" in rest.split("## The machine")[0]


def test_where_no_case_was_cut_nothing_is_said_of_it(root: Path, tmp_path: Path) -> None:
    document = json.loads((root / "report/chapters/collectives.json").read_text())
    document["findings"].update(cut="", gap="")
    changed = tmp_path / "collectives.json"
    changed.write_text(json.dumps(document))
    text = render([changed], templates=TEMPLATES, page_folder=tmp_path)
    assert "want of time" not in text
    assert "no time (" not in text


def test_all_markdown_is_rendered(html: str) -> None:
    text = re.sub(r"<code>.*?</code>", "", html)
    assert "**" not in text
    assert not re.search(r"(?<!\\)\|\s*-{3}", text), "a table that the renderer did not take"
    assert "{{" not in text
    assert "{%" not in text


def test_the_page_has_no_date_of_its_own(page: str) -> None:
    assert not re.search(r"20\d\d-\d\d-\d\d", page)


def test_a_rebuilt_chapter_leaves_no_old_figure(root: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "old.png").write_bytes(b"")
    (figures / "kept.txt").write_text("not ours")
    build(
        small_config(), "machine", machine="nvidia-h200", device="cuda",
        results=root / "results", figures=figures, out=tmp_path / "machine.json",
    )  # fmt: skip
    assert sorted(file.name for file in figures.iterdir()) == [
        "ceilings.png", "ceilings.svg", "kept.txt",
    ]  # fmt: skip


def test_without_any_result_there_is_still_a_page(tmp_path: Path) -> None:
    documents = []
    for chapter in CHAPTERS:
        documents.append(tmp_path / f"{chapter}.json")
        build(
            small_config(), chapter, machine="nvidia-h200", device="cuda",
            results=tmp_path / "results", figures=tmp_path / chapter, out=documents[-1],
        )  # fmt: skip
    text = render(documents, templates=TEMPLATES, page_folder=tmp_path)
    assert "No figure" in text
    assert "No result was read" in text
    assert "nan" not in re.sub(r"\w*nan\w+|\w+nan\w*", "", text)


def test_a_chapter_of_which_nothing_is_measured_is_one_line(root: Path, tmp_path: Path) -> None:
    documents = [root / f"report/chapters/{name}.json" for name in ("machine", "end_to_end")]
    documents.append(tmp_path / "precision.json")
    build(
        small_config(), "precision", machine="nvidia-h200", device="cuda",
        results=tmp_path / "results", figures=tmp_path / "figures", out=documents[-1],
    )  # fmt: skip
    text = render(documents, templates=TEMPLATES, page_folder=root / "report")
    assert "Of `precision` nothing is measured on this machine yet." in text
    assert "\n## Precision\n" not in text
    assert "| `precision` " in text.split("## Appendix")[1]


def test_a_users_own_model_is_named(page: str, root: Path, tmp_path: Path) -> None:
    document = json.loads((root / "report/chapters/end_to_end.json").read_text())
    document["settings"]["model"] = ["mine.net:Net"]
    changed = tmp_path / "end_to_end.json"
    changed.write_text(json.dumps(document))
    text = render([changed], templates=TEMPLATES, page_folder=tmp_path)
    assert "\n- **The model** is `mine.net:Net`, not the study's own" in text
    assert "**The model**" not in page


def test_failed_checks_stand_out_on_the_page(root: Path, tmp_path: Path) -> None:
    document = json.loads((root / "report/chapters/precision.json").read_text())
    document["warnings"] = ["A sum of <2> terms | is off."]
    changed = tmp_path / "precision.json"
    changed.write_text(json.dumps(document))
    text = render([changed], templates=TEMPLATES, page_folder=tmp_path)
    assert "> [!WARNING]\n> Checks that failed:\n>\n> - A sum of \\<2\\> terms \\| is off." in text


def test_what_a_template_prints_is_escaped(root: Path, tmp_path: Path) -> None:
    document = json.loads((root / "report/chapters/precision.json").read_text())
    document["findings"]["accumulation"] = KERNEL
    changed = tmp_path / "precision.json"
    changed.write_text(json.dumps(document))
    text = render([changed], templates=TEMPLATES, page_folder=tmp_path)
    shown = KERNEL.replace("<", "&lt;").replace(">", "&gt;")
    assert shown in MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(text)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            '{{ chapters[0].finding("nonsense") }}',
            "precision: no finding named 'nonsense'; there are:",
        ),
        ("{{ nonsense }}", "templates: 'nonsense' is undefined"),
        ("{% if %}", "templates: writeup.md.j2, line 1: "),
    ],
    ids=["unknown finding", "unknown name", "syntax"],
)
def test_a_wrong_template_ends_in_one_line(
    root: Path, tmp_path: Path, template: str, message: str
) -> None:
    (tmp_path / "writeup.md.j2").write_text(template)
    documents = [root / "report/chapters/precision.json"]
    with pytest.raises(PageError, match=re.escape(message)) as error:
        render(documents, templates=tmp_path, page_folder=tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_document_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(PageError, match="not a chapter's document"):
        write_page([tmp_path / "x.json"], templates=TEMPLATES, out=tmp_path / "page.md")


def test_neither_script_imports_torch(root: Path) -> None:
    program = (
        "import sys\n"
        "from lmlab.writeup import page\n"
        "assert 'pandas' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "from lmlab.writeup import build, registry\n"
        f"[registry.part(kind, c) for kind in registry.PARTS for c in {CHAPTERS}]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_chapters_code_is_its_own() -> None:
    prints = {chapter: chapter_fingerprint(chapter) for chapter in CHAPTERS}
    assert len(set(prints.values())) == len(CHAPTERS)
    assert page_fingerprint() not in prints.values()
    assert module_of("tables", "memory") == "lmlab.writeup.tables.memory"
