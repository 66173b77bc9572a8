"""What the helper imports: the compiler only where there is a GPU, and nothing that opens one."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from lmlab.measure.warm_start import preload


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A compiler that asks for GPUs when imported, on a machine that has one."""
    name = "stand_in_for_the_compiler"
    (tmp_path / f"{name}.py").write_text("import torch\nFOUND = torch.cuda.is_available()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preload, "LIBRARIES", ("json",))
    monkeypatch.setattr(preload, "COMPILER", (name,))
    monkeypatch.setattr(preload, "DRIVER", tmp_path)
    monkeypatch.setattr(preload, "_gpu_is_open", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_compiler_is_imported_without_asking_the_driver(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preload.preload()
    assert sys.modules.pop(compiler).FOUND is True


@pytest.mark.parametrize("reason", ["no driver", "no GPU", "opens the GPU", "cannot be imported"])
def test_otherwise_jobs_import_the_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    if reason == "no driver":
        monkeypatch.setattr(preload, "DRIVER", tmp_path / "absent")
    elif reason == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif reason == "opens the GPU":
        monkeypatch.setattr(preload, "_gpu_is_open", lambda: compiler in sys.modules)
    else:
        (tmp_path / f"{compiler}.py").write_text("raise ImportError\n")
    preload.preload()
    assert compiler not in sys.modules


def test_a_library_that_opens_the_gpu_is_refused(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "_gpu_is_open", lambda: True)
    with pytest.raises(RuntimeError, match="GPU"):
        preload.preload()
