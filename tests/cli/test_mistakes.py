"""A wrong word after `lmlab measure` is one line: the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.cli import main

NANO = ["--config", "study=nano"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The project's config.yaml is found from wherever we stand."""
    monkeypatch.chdir(tmp_path)


WRONG = {
    "unknown key": ("end_to_end", "contxt=128", "contxt = '128': no such key; allowed: size, con"),
    "a key of another chapter": ("precision", "context=128", "context = '128': no such key"),
    "no value": ("end_to_end", "context", "'context' is not key=value"),
    "unknown size": ("end_to_end", "size=huge", "size = 'huge'; allowed: small, medium"),
    "not a number": ("end_to_end", "context=long", "context = 'long'; allowed: an integer of at"),
    "too small": ("end_to_end", "warmup=-1", "warmup = '-1'; allowed: an integer of at least 0"),
    "a fraction": ("end_to_end", "steps=1.5", "steps = '1.5'; allowed: an integer of at least 1"),
    "infinite": ("end_to_end", "time_cap_s=inf", "time_cap_s = 'inf'; allowed: a number above 0"),
    "unknown precision": ("end_to_end", "precision=fp8", "precision = 'fp8'; allowed: fp32, tf32"),
    "unknown attention": ("end_to_end", "attention=magic", "attention = 'magic'; allowed: naive"),
    "an unknown arm": ("attention", "arms=naive,magic", "arms = 'naive,magic'; allowed: some"),
    "a tile of odd rows": ("attention", "tiles=3x5", "each of 16, 32, 64, 128, 256"),
    "a seed that torch cannot hold": ("end_to_end", f"seed={2**64}", "and at most 4294967295"),
    "no spread": ("data_parallel", "rounds=2", "rounds = '2'; allowed: an integer of at least 3"),
    "topic of another chapter": (
        *("precision", "topic=tiles"),
        "topic = 'tiles'; allowed: accumulation, autocast, layernorm",
    ),
    "topic that is not studied": (
        *("attention", "topic=leaderboard"),
        "topic = 'leaderboard'; allowed: naive, benchmark, tiles, model",
    ),
    "half a tile": ("attention", "tiles=128", "tiles = '128'; allowed: some of these"),
    "no import path": ("end_to_end", "model=Mine", "model = 'Mine'; allowed: an import path"),
    "model nowhere": (
        *("end_to_end", "model=nowhere:M"),
        "model = 'nowhere:M': module 'nowhere' is not on the Python path; allowed: what can be",
    ),
    "no such class": (
        *("end_to_end", "model=lmlab.model.transformer:GPT"),
        "model = 'lmlab.model.transformer:GPT': there is no 'GPT' in ",
    ),
    "attention nowhere": ("end_to_end", "attention=nowhere:f", "attention = 'nowhere:f': module"),
    "an arm nowhere": ("attention", "arms=naive,nowhere:f", "arms = 'nowhere:f': module 'nowh"),
    "not a boolean": ("machine", "quick=maybe", "quick = 'maybe'; allowed: true, false"),
    "no strategy": ("memory", "strategies=none,sqrt", "allowed: none, nested, every-K; several of"),
    "a strategy twice": (
        *("memory", "strategies=none,none"),
        "strategies = 'none,none'; allowed: none, nested, every-K; several of them separated by "
        "commas, each once",
    ),
    "heads that do not divide": ("end_to_end", "num_heads=3", "num_heads: 3 does not divide d_mo"),
}


@pytest.mark.parametrize(("chapter", "word", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_ends_in_one_line(
    chapter: str, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", chapter, word, *NANO]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_a_key_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "end_to_end", "context=16", "context=32", *NANO]) == 2
    error = capsys.readouterr().err
    assert error == "lmlab: context = '32': given before; allowed: each key once\n"


def test_a_points_value_behind_the_configuration_is_told_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["measure", "end_to_end", *NANO, "steps=5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lmlab: --config steps = '5': steps is not a key of the configuration")
    assert error.endswith("; a point's own values come before --config\n")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["measure", "status"])
def test_usage_has_the_configuration_last(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert usage.endswith("[--config key=value ...]")
    assert ("CHAPTER [key=value ...]" in usage) == (command == "measure")


def test_only_the_chapter_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["measure", *NANO, "end_to_end"])
    error = capsys.readouterr().err
    assert error.splitlines()[-1].endswith("arguments are required: CHAPTER")
    assert "[--config key=value ...]\n" in error


def test_a_model_whose_file_is_no_python_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slip.py").write_text("class Net(:\n")
    assert main(["measure", "end_to_end", "model=slip:Net", *NANO]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lmlab: model = 'slip:Net': ")
    assert "slip.py, line 1: invalid syntax; allowed: what can be imported" in error
    assert len(error.splitlines()) == 1
