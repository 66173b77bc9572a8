"""`lmlab compare` on real folders: the H200 at two commits, seeded changes, a CPU, old results."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import main
from lmlab.measure.records import value, without_value
from tests.processes import git
from tests.project import GOLDEN_RESULTS, H200_RESULTS
from tests.report.study import result, rewrite, scale, time_record

Compare = Callable[..., tuple[int, dict[str, Any]]]
GATE = ("--fail-if-slower", "5%")


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        status = main(["compare", *map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out.splitlines()[0])

    return run


def copied(folder: Path, to: Path, chapters: str = "machine.json end_to_end") -> Path:
    to.mkdir(parents=True)
    subprocess.run(["cp", "-r", *[folder / name for name in chapters.split()], to], check=True)
    return to


def slower(factor: float) -> Callable[[dict[str, Any]], None]:
    return lambda result: scale(result["measurements"], factor)


def multiplied(quantity: str, factor: float, **labels: int) -> Callable[[dict[str, Any]], None]:
    def change(result: dict[str, Any]) -> None:
        for record in result["measurements"]:
            if record["quantity"] == quantity:
                record["value"] *= factor
                record["labels"] |= labels

    return change


def step(folder: Path, precision: str = "fp32", context: int = 1024) -> Path:
    """A training step that the GPU paces: two processes agree on it within 1 %."""
    start = folder / f"end_to_end/size~xl/context~{context}/batch~4/precision~{precision}"
    return start / "mode~train_step/attention~naive/warmup~5/start~warm.json"


@pytest.mark.parametrize(
    ("factor", "clock", "verdict"),
    [
        (1.25, "wall", "slower"),
        (0.8, "wall", "faster"),
        (1.0, "device", "same"),
        (1.0, "wall", "undecided"),  # two processes differ by as much
    ],
)
def test_a_seeded_change_gets_its_verdict(
    compare: Compare, tmp_path: Path, factor: float, clock: str, verdict: str
) -> None:
    changed = copied(H200_RESULTS, tmp_path / "nvidia-h200")
    rewrite(step(changed), slower(factor))
    status, found = compare(H200_RESULTS, changed, "--chapter", "end_to_end", *GATE)
    anew = [pair for pair in found["pairs"] if not pair["identical"]]
    (mine,) = [p for p in anew if p["clock"] == clock and "phase=total" in p["point"]]
    assert mine["verdict"] == verdict
    assert mine["ratio"] == pytest.approx(1 / factor)
    assert mine["low"] <= mine["ratio"] <= mine["high"]
    assert {pair["verdict"] for pair in found["pairs"] if pair["identical"]} == {"same"}
    assert status == (1 if factor == 1.25 else 0)


def test_two_runs_pass_the_gate_until_a_step_gets_slower(compare: Compare, tmp_path: Path) -> None:
    repeat = H200_RESULTS.with_name("nvidia-h200@repeat")
    second = copied(repeat, tmp_path / "nvidia-h200", "end_to_end")
    gate = (H200_RESULTS, second, *GATE)
    status, found = compare(*gate)
    by_device = [pair for pair in found["pairs"] if pair["clock"] == "device"]
    apart = [pair["ratio"] for pair in by_device if pair["verdict"] not in ("same", "undecided")]
    assert len(apart) < 0.02 * len(by_device), "one in a hundred or so differs by more than noise"
    assert apart == pytest.approx([1.0] * len(apart), rel=0.03)
    by_wall = {pair["verdict"] for pair in found["pairs"] if pair["clock"] == "wall"}
    assert by_wall & {"faster", "slower"}, "of hundreds of pairs, some differ by chance"
    assert status == 0
    rewrite(step(second, context=512), slower(1.1))
    assert compare(*gate)[0] == 1


def test_a_rate_counts_as_faster_when_it_is_higher(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200_RESULTS, tmp_path / "a", "machine.json")
    # Another shape was the fastest.
    rewrite(changed / "machine.json", multiplied("matmul_rate", 2, side=8192))
    _, found = compare(H200_RESULTS, changed, "--chapter", "machine", "--where", "dtype=bf16")
    assert [(pair["ratio"], pair["verdict"]) for pair in found["pairs"]] == [(2.0, "undecided")]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.02, "more"), (0.98, "less"), (1.005, "same"), (1.0, "same")]
)
def test_memory_is_compared_without_noise(
    compare: Compare, tmp_path: Path, factor: float, verdict: str
) -> None:
    changed = copied(H200_RESULTS, tmp_path / "a", "end_to_end")
    rewrite(step(changed), multiplied("peak_memory", factor))
    status, found = compare(H200_RESULTS, changed, "--fail-if-slower", "0%")
    anew = [pair for pair in found["pairs"] if not pair["identical"]]
    (mine,) = [pair for pair in anew if pair["quantity"] == "peak_memory"]
    assert (mine["verdict"], mine["ratio"]) == (verdict, pytest.approx(1 / factor))
    assert mine["low"] == mine["high"] == mine["ratio"]
    (counts,) = [row for row in found["chapters"] if row["clock"] == "memory"]
    assert counts[verdict] == (counts["pairs"] if verdict == "same" else 1)
    assert status == 0


@pytest.mark.parametrize(
    ("after", "verdicts"), [(5.0, ["more", "undecided"]), (0.0, ["same", "same"])]
)
def test_zero_is_a_value(
    compare: Compare, tmp_path: Path, after: float, verdicts: list[str]
) -> None:
    sets = [tmp_path / "a", tmp_path / "b"]
    for folder, number in zip(sets, (0.0, after), strict=True):
        records = [value("memory", number, "B"), time_record([number] * 3, clock="device")]
        result({}, records, elapsed_s=number).write(folder / "a.json")
    assert [pair["verdict"] for pair in compare(*sets)[1]["pairs"]] == verdicts
    assert main(["compare", *map(str, sets[::-1])]) == 0


@pytest.mark.parametrize(
    ("variant", "state", "status"),
    [("a, b", "oom", 1), ("a, b", "unsupported", 0), ("a", "failed", 0), ("a, b c", "failed", 0)],
)
def test_a_variant_that_no_longer_runs_does_not_pass_the_gate(
    compare: Compare, tmp_path: Path, variant: str, state: Any, status: int
) -> None:
    kept, lost = (time_record([1.0], variant=name, phase="x") for name in ("c", "a, b"))
    failed = without_value("time", state, "no room", variant=variant)
    for folder, second in (("a", lost), ("b", failed)):
        result({}, [kept, second]).write(tmp_path / folder / "a.json")
    sets = (tmp_path / "a", tmp_path / "b", "--where", "phase=x")
    assert compare(*sets, *GATE)[0] == status
    assert len(compare(*sets, "--variant", "a, b")[1]["only"]["a"]) == 1


def test_what_one_set_lacks_is_named_with_the_reason(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200_RESULTS, tmp_path / "a", "end_to_end")
    step(changed).unlink()
    step(changed, "bf16").write_text('{"schema_version": 2,')
    failed = {"status": "oom", "reason": "out of memory", "measurements": []}
    rewrite(step(changed, "fp32", 512), lambda result: result.update(failed))
    rewrite(step(changed, "bf16", 512), lambda result: result["measurements"][0].pop("value"))
    status, found = compare(H200_RESULTS / "end_to_end", changed / "end_to_end", *GATE)
    assert {row["other_status"] for row in found["only"]["a"]} == {"missing", "oom"}
    assert len({row["file"] for row in found["only"]["a"]}) == 4
    assert found["only"]["b"] == []
    assert len(found["b"]["problems"]) == 2
    assert status == 1, "what ran out of memory does not pass"
    step(changed, "fp32", 512).unlink()
    assert compare(H200_RESULTS / "end_to_end", changed / "end_to_end", *GATE)[0] == 0


def test_a_set_without_a_measured_point_has_nothing_to_compare(compare: Compare) -> None:
    sets = (H200_RESULTS / "fsdp/placement~own_gpu", H200_RESULTS)
    status, found = compare(*sets)
    assert (status, found["pairs"], found["a"]["problems"]) == (0, [], [])
    assert compare(*sets, *GATE)[0] == 2


def test_results_are_chosen_by_a_setting_named_as_a_field(compare: Compare) -> None:
    chosen = ("--chapter", "attention", "--where", "topic=leaderboard", "--where", "samples=100")
    assert compare(H200_RESULTS, H200_RESULTS, *chosen)[1]["pairs"]


def test_other_work_is_not_compared(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200_RESULTS, tmp_path / "a", "end_to_end")
    rewrite(step(changed), lambda result: result["settings"].update(vocab_size=5))
    rewrite(step(changed, "bf16"), lambda result: result["settings"].update(steps=3, new=1))
    _, found = compare(H200_RESULTS, changed, "--where", "size=xl", "--where", "context=1024")
    assert found["other_work"] == {"vocab_size": [10000, 5]}
    measured_again = [pair for pair in found["pairs"] if not pair["identical"]]
    assert {"precision=bf16" in pair["point"] for pair in measured_again} == {True}


def test_ranks_that_chose_another_size_are_not_compared(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200_RESULTS, tmp_path / "a", "fsdp")
    _, same = compare(H200_RESULTS, changed, "--where", "chapter=fsdp")
    assert same["pairs"]
    size = {"quantity": "size", "status": "ok"}.items()
    for file in changed.rglob("placement~shared_gpu/**/*.json"):
        rewrite(file, lambda r: [m.update(value=0) for m in r["measurements"] if size <= m.items()])
    _, found = compare(H200_RESULTS, changed, "--where", "chapter=fsdp")
    assert not found["pairs"]
    assert set(found["other_work"]) == {"size for memory and time"}


def test_one_set_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(H200_RESULTS, tmp_path / "results" / "first", "machine.json")
    copied(H200_RESULTS, tmp_path / "results" / "second", "machine.json")
    assert main(["compare", str(tmp_path / "results"), str(H200_RESULTS)]) == 2
    assert "first/machine.json and second/machine.json" in capsys.readouterr().err


def test_machines_and_versions_that_differ_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(H200_RESULTS), str(GOLDEN_RESULTS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    differing = [line for line in lines if line.startswith("differs: ")]
    assert lines[2 : 2 + len(differing)] == differing
    for fact in ("machine", "torch", "power limit w", "clocks mhz sm max"):
        assert any(line.startswith(f"differs: {fact}: ") for line in differing), fact


def test_without_repeats_the_spread_within_jobs_counts(compare: Compare, tmp_path: Path) -> None:
    changed = copied(GOLDEN_RESULTS, tmp_path / "a", "collectives")
    rewrite(next(changed.rglob("*.json")), slower(1000))
    status, found = compare(GOLDEN_RESULTS / "collectives", changed / "collectives")
    assert {pair["verdict"] for pair in found["pairs"]} == {"slower"}
    assert status == 0


@pytest.mark.parametrize("share", ["5", "x%", "-5%"])
def test_a_gate_is_a_share(share: str) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", f"--fail-if-slower={share}"])


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository whose first commit holds results of schema 1, its second those of the H200, and
    its working tree a slower step."""
    root = tmp_path / "project"
    machine = copied(H200_RESULTS, root / "results" / "nvidia-h200")
    step(machine).unlink()
    for path in machine.rglob("*.json"):
        path.write_text('{"schema_version": 1}')
    (machine / "dangling.json").symlink_to("nowhere")
    for message in ("old", "new"):
        for command in (["init", "-q"], ["add", "results"], ["commit", "-qm", message]):
            git(root, *command)
        shutil.copytree(H200_RESULTS / "end_to_end", machine / "end_to_end", dirs_exist_ok=True)
    rewrite(step(machine), slower(1.5))
    return root


def test_a_set_at_a_revision(
    compare: Compare, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(history)
    for place in ("", "results/", f"{history}/results/"):
        status, found = compare(f"{place}nvidia-h200:HEAD", "nvidia-h200", *GATE)
        anew = [pair["point"] for pair in found["pairs"] if not pair["identical"]]
        assert (status, {"mode=train_step" in point for point in anew}) == (1, {True})
    status, found = compare("nvidia-h200:HEAD~1", "nvidia-h200")
    assert found["pairs"] == []
    assert {"(schema 1)" in problem for problem in found["a"]["problems"]} == {True}
    assert git(history, "status", "--short")
    # In another repository, names are also looked up in the project's.
    monkeypatch.setattr("lmlab.result_sets.sets.ROOT", history)
    monkeypatch.chdir(history.parent)
    git(Path(), "init", "-q")
    assert compare("nvidia-h200:HEAD", history / "results" / "nvidia-h200")[1]["pairs"]
