"""`lmlab compare` on real folders: the H200 at two commits, seeded changes, a CPU, old results."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import main
from tests.processes import git
from tests.project import GOLDEN, H200
from tests.report.study import rewrite, scale

Compare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        status = main(["compare", *map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out.splitlines()[0])

    return run


def copied(folder: Path, to: Path, chapters: str = "machine.json end_to_end") -> Path:
    to.mkdir(parents=True)
    parts = [folder / name for name in chapters.split()]
    subprocess.run(["cp", "-r", *parts, to], check=True)
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


def chose(size: str) -> Callable[[dict[str, Any]], None]:
    """Ranks that chose a size of model."""

    def change(result: dict[str, Any]) -> None:
        for record in result["measurements"]:
            if record["quantity"] == "size" and record["status"] == "ok":
                record["value"] = size

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
    changed = copied(H200, tmp_path / "nvidia-h200")
    rewrite(step(changed), slower(factor))
    status, found = compare(H200, changed, "--chapter", "end_to_end", "--fail-if-slower", "5%")
    anew = [pair for pair in found["pairs"] if not pair["identical"]]
    (mine,) = [p for p in anew if p["clock"] == clock and "phase=total" in p["point"]]
    assert mine["verdict"] == verdict
    assert mine["ratio"] == pytest.approx(1 / factor)
    assert mine["low"] <= mine["ratio"] <= mine["high"]
    assert {pair["verdict"] for pair in found["pairs"] if pair["identical"]} == {"same"}
    assert status == (1 if factor == 1.25 else 0)


def test_two_runs_pass_the_gate_until_a_step_gets_slower(compare: Compare, tmp_path: Path) -> None:
    second = copied(H200.with_name("nvidia-h200@repeat"), tmp_path / "nvidia-h200", "end_to_end")
    gate = (H200, second, "--fail-if-slower", "5%")
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
    changed = copied(H200, tmp_path / "a", "machine.json")
    # Another shape was the fastest.
    rewrite(changed / "machine.json", multiplied("matmul_rate", 2, side=8192))
    _, found = compare(H200, changed, "--chapter", "machine", "--where", "dtype=bf16")
    assert [(pair["ratio"], pair["verdict"]) for pair in found["pairs"]] == [(2.0, "undecided")]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.02, "more"), (0.98, "less"), (1.005, "same"), (1.0, "same")]
)
def test_memory_is_compared_without_noise(
    compare: Compare, tmp_path: Path, factor: float, verdict: str
) -> None:
    changed = copied(H200, tmp_path / "a", "end_to_end")
    rewrite(step(changed), multiplied("peak_memory", factor))
    status, found = compare(H200, changed, "--fail-if-slower", "0%")
    anew = [pair for pair in found["pairs"] if not pair["identical"]]
    (mine,) = [pair for pair in anew if pair["quantity"] == "peak_memory"]
    assert (mine["verdict"], mine["ratio"]) == (verdict, pytest.approx(1 / factor))
    assert mine["low"] == mine["high"] == mine["ratio"]
    (counts,) = [row for row in found["chapters"] if row["clock"] == "memory"]
    assert counts[verdict] == (counts["pairs"] if verdict == "same" else 1)
    assert status == 0


def test_what_one_set_lacks_is_named_with_the_reason(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200, tmp_path / "a", "end_to_end")
    step(changed).unlink()
    step(changed, "bf16").write_text('{"schema_version": 2,')
    failed = {"status": "oom", "reason": "out of memory", "measurements": []}
    rewrite(step(changed, "fp32", 512), lambda result: result.update(failed))
    _, found = compare(H200, changed, "--chapter", "end_to_end")
    assert {row["other_status"] for row in found["only"]["a"]} == {"missing", "oom"}
    assert len({row["file"] for row in found["only"]["a"]}) == 3
    assert found["only"]["b"] == []
    assert len(found["b"]["problems"]) == 1


def test_a_record_without_a_value_is_a_problem(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200, tmp_path / "a", "end_to_end")
    rewrite(step(changed), lambda result: result["measurements"][0].pop("value"))
    _, found = compare(H200, changed, "--chapter", "end_to_end")
    assert len(found["b"]["problems"]) == 1


def test_a_set_without_a_measured_point_has_nothing_to_compare(compare: Compare) -> None:
    sets = (H200 / "fsdp/placement~own_gpu", H200)
    status, found = compare(*sets)
    assert (status, found["pairs"], found["a"]["problems"]) == (0, [], [])
    assert compare(*sets, "--fail-if-slower", "5%")[0] == 2


def test_results_are_chosen_by_a_setting_named_as_a_field(compare: Compare) -> None:
    chosen = ("--chapter", "attention", "--where", "topic=leaderboard", "--where", "samples=100")
    assert compare(H200, H200, *chosen)[1]["pairs"]


@pytest.mark.parametrize("condition", ["sizee=small", "size=tiny", "size=small,tiny"])
def test_a_condition_that_no_record_meets_is_refused(
    capsys: pytest.CaptureFixture[str], condition: str
) -> None:
    folder = str(H200 / "end_to_end")
    assert main(["compare", folder, folder, "--where", condition, "--fail-if-slower=5%"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert condition.partition("=")[0] in line
    assert "allowed: " in line


def test_other_work_is_not_compared(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200, tmp_path / "a", "end_to_end")
    rewrite(step(changed), lambda result: result["settings"].update(vocab_size=5))
    rewrite(step(changed, "bf16"), lambda result: result["settings"].update(steps=3, new=1))
    _, found = compare(H200, changed, "--where", "size=xl", "--where", "context=1024")
    assert found["other_work"] == {"vocab_size": [10000, 5]}
    measured_again = [pair for pair in found["pairs"] if not pair["identical"]]
    assert {"precision=bf16" in pair["point"] for pair in measured_again} == {True}


def test_ranks_that_chose_another_size_are_not_compared(compare: Compare, tmp_path: Path) -> None:
    changed = copied(H200, tmp_path / "a", "fsdp")
    _, same = compare(H200, changed, "--where", "chapter=fsdp")
    assert same["pairs"]
    for file in changed.rglob("placement~shared_gpu/**/*.json"):
        rewrite(file, chose("other"))
    _, found = compare(H200, changed, "--where", "chapter=fsdp")
    assert not found["pairs"]
    assert set(found["other_work"]) == {"size for memory and time"}


def test_one_set_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(H200, tmp_path / "results" / "first", "machine.json")
    copied(H200, tmp_path / "results" / "second", "machine.json")
    assert main(["compare", str(tmp_path / "results"), str(H200)]) == 2
    assert "first/machine.json and second/machine.json are one point" in capsys.readouterr().err


def test_machines_and_versions_that_differ_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(H200), str(GOLDEN)]) == 0
    lines = capsys.readouterr().out.splitlines()
    differing = [line for line in lines if line.startswith("differs: ")]
    assert lines[2 : 2 + len(differing)] == differing
    for fact in ("machine", "torch", "power limit w", "clocks mhz sm max"):
        assert any(line.startswith(f"differs: {fact}: ") for line in differing), fact


def test_without_repeats_the_spread_within_jobs_counts(compare: Compare, tmp_path: Path) -> None:
    changed = copied(GOLDEN, tmp_path / "a", "collectives")
    rewrite(next(changed.rglob("*.json")), slower(1000))
    status, found = compare(GOLDEN / "collectives", changed / "collectives")
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
    machine = copied(H200, root / "results" / "nvidia-h200")
    step(machine).unlink()
    for path in machine.rglob("*.json"):
        path.write_text('{"schema_version": 1}')
    (machine / "dangling.json").symlink_to("nowhere")
    for message in ("old", "new"):
        for command in (["init", "-q"], ["add", "results"], ["commit", "-qm", message]):
            git(root, *command)
        shutil.copytree(H200 / "end_to_end", machine / "end_to_end", dirs_exist_ok=True)
    rewrite(step(machine), slower(1.5))
    return root


def test_a_set_at_a_revision(
    compare: Compare, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(history)
    for new in (
        "nvidia-h200:HEAD",
        "results/nvidia-h200:HEAD",
        f"{history}/results/nvidia-h200:HEAD",
    ):
        status, found = compare(new, "nvidia-h200", "--fail-if-slower", "5%")
        anew = [pair["point"] for pair in found["pairs"] if not pair["identical"]]
        assert (status, {"mode=train_step" in point for point in anew}) == (1, {True})
    status, found = compare("nvidia-h200:HEAD~1", "nvidia-h200")
    assert found["pairs"] == []
    assert {"(schema 1)" in problem for problem in found["a"]["problems"]} == {True}
    assert git(history, "status", "--short")
