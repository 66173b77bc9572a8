"""Versions that affect speed, and the commit of a repository with or without edits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import lmlab
from lmlab.measure.environment import commit, versions


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "results").mkdir()
    for name in ("tracked.txt", "results/point.json"):
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "dirty"),
    [(None, False), ("tracked.txt", True), ("untracked.txt", False), ("results/point.json", False)],
)
def test_only_edits_of_tracked_code_are_dirty(
    repository: Path, edited: str | None, dirty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLAB_COMMIT", "a" * 40)  # counts only without a repository
    if edited:
        (repository / edited).write_text("two\n")
    assert commit(repository) == {"id": git(repository, "rev-parse", "HEAD"), "dirty": dirty}


@pytest.mark.parametrize("git_installed", [True, False])
def test_without_a_repository_or_git_a_given_commit_is_unverified_and_not_clean(
    git_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if not git_installed:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    assert commit(tmp_path) == {"id": None, "dirty": None}
    monkeypatch.setenv("LMLAB_COMMIT", "a" * 40)
    assert commit(tmp_path) == {"id": "a" * 40, "dirty": None, "unverified": True}
    monkeypatch.setenv("LMLAB_COMMIT", "main")
    with pytest.raises(ValueError, match=r"^LMLAB_COMMIT = 'main'; allowed"):
        commit(tmp_path)


def test_versions_are_text_or_null() -> None:
    found = versions()
    assert set(found) == {"python", "torch", "triton", "cuda", "cudnn", "driver", "lmlab"}
    assert (found["torch"], found["lmlab"]) == (torch.__version__, lmlab.__version__)
    assert all(value is None or type(value) is str for value in found.values())
