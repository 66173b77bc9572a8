"""The compiler starts fresh, compiles once, and leaves caches and settings as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import compiler

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_a_second_compilation_of_a_function_is_an_error() -> None:
    compiled = torch.compile(plus_one, backend="eager", dynamic=False)
    with compiler():
        compiled(torch.ones(2))
        compiled(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"(?i)recompil"):
            compiled(torch.ones(3))
    compiled(torch.ones(4))


def test_cold_caches_are_temporary() -> None:
    before = {name: os.environ.get(name) for name in VARIABLES}
    with compiler(cold=True):
        folders = [os.environ[name] for name in VARIABLES]
        assert set(folders).isdisjoint(before.values())
        Path(folders[0]).mkdir()
    assert not any(map(os.path.exists, folders))
    assert {name: os.environ.get(name) for name in VARIABLES} == before


def test_tritons_cache_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"].endswith(".triton/cache")
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
