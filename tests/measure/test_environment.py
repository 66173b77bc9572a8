"""Versions that matter to speed, and the commit of a repository with or without edits."""

from __future__ import annotations

import json
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
    (tmp_path / "tracked.txt").write_text("one\n")
    git(tmp_path, "add", "tracked.txt")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_clean_checkout_gives_its_commit(repository: Path) -> None:
    assert commit(repository) == {"id": git(repository, "rev-parse", "HEAD"), "dirty": False}


def test_an_edit_of_a_tracked_file_is_dirty(repository: Path) -> None:
    (repository / "tracked.txt").write_text("two\n")
    assert commit(repository)["dirty"] is True


def test_untracked_files_are_not_dirty(repository: Path) -> None:
    (repository / "results.json").write_text("{}\n")
    assert commit(repository)["dirty"] is False


def test_a_changed_result_is_not_dirty(repository: Path) -> None:
    result = repository / "results" / "point.json"
    result.parent.mkdir()
    result.write_text("{}\n")
    git(repository, "add", "results")
    git(repository, "commit", "--quiet", "-m", "a result")
    result.write_text("[]\n")
    assert commit(repository)["dirty"] is False


def test_a_copy_without_its_repository_is_told_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("LMLAB_COMMIT", "a" * 40)
    assert commit(tmp_path) == {"id": "a" * 40, "dirty": False}
    monkeypatch.setenv("LMLAB_COMMIT", "main")
    with pytest.raises(ValueError, match="LMLAB_COMMIT = 'main'"):
        commit(tmp_path)


def test_a_folder_inside_the_repository_gives_the_same_commit(repository: Path) -> None:
    (repository / "inside").mkdir()
    assert commit(repository / "inside") == commit(repository)


def test_without_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == {"id": None, "dirty": False}


def test_without_git_there_is_no_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    assert commit(repository) == {"id": None, "dirty": False}


def test_versions_name_everything_a_result_carries() -> None:
    found = json.loads(json.dumps(versions()))
    assert set(found) == {"python", "torch", "triton", "cuda", "cudnn", "driver", "lmlab"}
    assert found["torch"] == torch.__version__
    assert found["lmlab"] == lmlab.__version__
    assert found["cuda"] == torch.version.cuda
    assert all(value is None or isinstance(value, str) for value in found.values())
