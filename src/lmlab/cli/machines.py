"""Render the comparison page: results of several machines, with published figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lmlab.chapters import compare_page
from lmlab.chapters.end_to_end.page import NOISE
from lmlab.chapters.machine.page import ceilings as ceilings_of
from lmlab.cli.report import load_results, page_of
from lmlab.measure.peaks import known_devices, peaks_of
from lmlab.report.frame import select, table_of
from lmlab.report.page import build_chapters, described, environment_for
from lmlab.result_sets.differences import BOUNDS, differences
from lmlab.result_sets.machines import COPY, Machine, Question, Section, ceilings, questions
from lmlab.result_sets.published import load_published
from lmlab.result_sets.sets import load_set
from lmlab.study.config import load as load_study
from lmlab.study.files import REFERENCES, TEMPLATES, write_atomically
from lmlab.study.selection import device_of


def write_comparison(
    config: Mapping[str, Any], *, machines: Sequence[str], results: Path, out: Path
) -> list[str]:
    """Write the page `out` and its figures next to it; returns one line per part that failed."""
    if not any(machines):
        raise ValueError(f"no results to compare in {results}")
    faults: list[str] = []
    columns = [_measured(config, name, results, faults) for name in machines]
    published = list(_published())
    study = load_study(config, device_of(machines[0]))
    sets = [load_set(str(results / name)) for name in machines]
    facts = [differences(sets[0], other, NOISE) for other in sets[1:]]
    # The largest in any comparison with the first machine.
    variation = {bound: max(each.variation[bound] for each in facts) for bound in BOUNDS if facts}
    sections: list[dict[str, Any]] = []
    tables = compare_page.TABLES  # of plain records, so published figures fit in
    for question in questions(list(study.chapters), lambda c: page_of(c).TABLES, tables):
        mine = [m for m in (*columns, *published) if _takes_part(m, question)]
        try:
            column = compare_page.COLUMNS.get(question.heading)
            found = Section(question, mine, NOISE, variation, column)
            path = out.with_suffix("") / f"{question.chapter}-{len(sections)}.png"
            figure = found.figure(path) if found.entries else False
            table = found.markdown() if found.entries else None
            table = ceilings(mine) if question.chapter == "machine" else table
        except Exception as error:  # one bad value must not cost the page
            faults.append(f"{question.heading}: {described(error)}")
            continue
        link = Markup(f"{path.parent.name}/{path.name}") if figure else None
        absent = [machine.name for machine in columns if not _takes_part(machine, question)]
        section = {"heading": question.heading, "table": table, "figure": link, "absent": absent}
        sections.append(section)
    differs = [(columns[i].name, each.differs) for i, each in enumerate(facts, 1)]
    shown = {"machines": columns, "differs": differs, "sections": sections, "faults": faults}
    write_atomically(out, environment_for(TEMPLATES).get_template("compare.md.j2").render(**shown))
    return faults


def _measured(config: Mapping[str, Any], name: str, results: Path, faults: list[str]) -> Machine:
    study = load_study(config, device_of(name))
    found = load_results(study, name, results)
    pages = {chapter: page_of(chapter) for chapter in study.chapters}
    chapters, failed = build_chapters(pages, replace(found, repeat=None))
    faults += [f"{name}: {fault}" for fault in (*found.problems, *failed)]
    label = name.partition("@")[2]
    title = f"{found.name} ({label})" if label else found.name
    rows = {chapter: each.own.rows for chapter, each in chapters.items()}
    own, stated = ceilings_of(found), ceilings_of(found, "stated_")
    return Machine(name=title, chapters=rows, ceilings=own, stated=stated)


def _published() -> Iterator[Machine]:
    """One machine per GPU with published figures; its ceilings are those its vendor states."""
    for gpu, chapters in compare_page.published(load_published(REFERENCES)).items():
        names = [name for name in known_devices() if name.endswith(f" {gpu}")]
        peaks = peaks_of(names[0]) if len(names) == 1 else None
        stated = {**peaks["tflops"], COPY: peaks["memory_tb_per_s"] * 1e3} if peaks else {}
        given: dict[str, Any] = {"chapters": chapters, "ceilings": stated, "stated": stated}
        yield Machine(name=f"{gpu}, published", published=True, **given)


def _takes_part(machine: Machine, question: Question) -> bool:
    """Whether a machine has values for the chapter or, if published, for the table's quantity."""
    rows = machine.chapters.get(question.chapter, table_of([]))
    if not machine.published:
        return not select(rows, status="ok").empty
    if question.heading not in compare_page.TABLES:
        return question.chapter == "machine"  # vendors state its ceilings
    wanted = {k: v for k, v in question.table.where.items() if k == "topic" and k in rows}
    wanted["quantity"] = next(iter(question.table.columns.values())).where["quantity"]
    return not select(rows, status="ok", **wanted).empty
