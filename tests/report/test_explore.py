"""The interactive page in a real browser: it draws, reacts, and makes no requests."""

import gzip
import json
import re
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from unittest.mock import Mock

import pytest

from lmlab.report.explore import explorer
from lmlab.report.figure import Figure
from lmlab.report.page import build_chapters
from lmlab.study.files import TEMPLATES
from tests.report.study import small_study
from tests.report.test_page import page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Runs in the page once it has drawn: changes a selection and reports errors and requests.
PROBE = """
<script>
const errors = [];
window.addEventListener("error", event => errors.push(event.message));
window.addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
const drawing = () => document.querySelector("#chart svg")?.outerHTML;
const until = (done, then) => done() ? then() : setTimeout(() => until(done, then), 50);
window.addEventListener("load", () => until(drawing, () => {
  const before = drawing();
  const filter = document.querySelector("#filters select, #quantity");
  filter.value = filter.options[filter.options.length - 1].value;
  filter.dispatchEvent(new Event("change"));
  until(() => drawing() && drawing() !== before, () => {
    const report = document.createElement("pre");
    report.id = "probe";
    report.textContent = JSON.stringify({
      errors,
      requests: performance.getEntriesByType("resource").map(entry => entry.name),
    });
    document.body.append(report);
  });
}));
</script>
"""


def explored(folder: Path) -> tuple[str, list[str]]:
    results = small_study(folder)
    chapters, _ = build_chapters({"steps": page()}, results)
    return explorer(results, chapters, TEMPLATES / "explore.html")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    html, faults = explored(tmp_path_factory.mktemp("results"))
    assert not faults
    return html


@pytest.mark.slow
def test_a_figure_that_fails_costs_that_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "vega", Mock(side_effect=KeyError("term")))
    html, (fault,) = explored(tmp_path)
    assert "KeyError" in fault
    assert 'id="data"' in html


@pytest.mark.slow
def test_the_data_has_every_number_with_its_source(html: str) -> None:
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "</" not in data[1]
    embedded = json.loads(gzip.decompress(b64decode(data[1])))
    assert {row["quantity"] for row in embedded["rows"]} == {"time", "peak_memory"}
    assert all(row["source"] < len(embedded["sources"]) for row in embedded["rows"])
    assert all(len(source["commit"]) >= 7 for source in embedded["sources"])
    assert len(embedded["figures"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_it_works_offline_in_a_browser(html: str, tmp_path: Path) -> None:
    file = tmp_path / "explore.html"
    file.write_text(html.replace("<h1>", f"{PROBE}<h1>", 1))
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=60000",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    report = json.loads(found[1].replace("&quot;", '"').replace("&gt;", ">").replace("&lt;", "<"))
    assert report["errors"] == []
    assert report["requests"] == []
