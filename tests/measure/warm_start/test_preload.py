"""What the helper imports: the compiler only where there is a GPU, and nothing that opens one."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from lmlab.measure.warm_start import helper


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A compiler that asks for GPUs when imported, on a machine that has one."""
    name = "stand_in_for_the_compiler"
    (tmp_path / f"{name}.py").write_text("import torch\nFOUND = torch.cuda.is_available()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(helper, "LIBRARIES", ("json",))
    monkeypatch.setattr(helper, "COMPILER", (name,))
    monkeypatch.setattr(helper, "DRIVER", tmp_path)
    monkeypatch.setattr(helper, "_gpu_is_open", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_compiler_is_imported(compiler: str) -> None:
    helper.preload()
    assert sys.modules.pop(compiler).FOUND is True


@pytest.mark.parametrize("reason", ["no driver", "no GPU", "opens the GPU", "cannot be imported"])
def test_otherwise_jobs_import_the_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    if reason == "no driver":
        monkeypatch.setattr(helper, "DRIVER", tmp_path / "absent")
    elif reason == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif reason == "opens the GPU":
        monkeypatch.setattr(helper, "_gpu_is_open", lambda: compiler in sys.modules)
    else:
        (tmp_path / f"{compiler}.py").write_text("raise ImportError\n")
    helper.preload()
    assert compiler not in sys.modules


def test_a_library_may_not_open_the_gpu(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_gpu_is_open", lambda: True)
    with pytest.raises(RuntimeError, match="GPU"):
        helper.preload()
