"""The compiler is held to its word: fresh, never twice, caches where they belong."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import compiler, compiler_for, first_call_s

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def test_a_second_compilation_of_a_function_is_an_error() -> None:
    compiled = torch.compile(plus_one, backend="eager", dynamic=False)
    with compiler():
        compiled(torch.ones(2))
        compiled(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"(?i)recompil"):
            compiled(torch.ones(3))
    compiled(torch.ones(4))


def test_a_new_setting_starts_with_nothing_compiled() -> None:
    compiled = torch.compile(plus_one, backend="eager", dynamic=False)
    for length in (2, 3):
        with compiler():
            compiled(torch.ones(length))


def test_cold_caches_are_a_folder_of_their_own_and_gone_afterwards() -> None:
    before = environment()
    with compiler(cold=True):
        folders = [os.environ[name] for name in VARIABLES]
        assert set(folders).isdisjoint(before.values())
        Path(folders[0]).mkdir()
    assert not any(map(os.path.exists, folders))
    assert environment() == before


def test_tritons_cache_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"].endswith(".triton/cache")
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_graphs_are_kept_whole_only_where_they_are_used_twice() -> None:
    import torch._functorch.config as config

    before = config.donated_buffer
    with compiler():
        assert config.donated_buffer == before
    with compiler(graphs_kept=True):
        assert config.donated_buffer is False
    assert config.donated_buffer == before


def test_the_compiler_is_loaded_for_variants_that_compile_only() -> None:
    assert isinstance(compiler_for(["naive", "tiled"]), nullcontext)
    assert not isinstance(compiler_for(["naive", "flex"]), nullcontext)


def test_the_first_call_is_timed() -> None:
    calls: list[int] = []
    assert first_call_s(lambda: calls.append(1), torch.device("cpu")) > 0
    assert calls == [1]
