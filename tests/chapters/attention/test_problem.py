"""The right numbers of a problem: reference, errors, FLOPs and memory; and the compiler."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmlab.attention import naive
from lmlab.chapters.attention import naive_memory
from lmlab.chapters.attention.measure import problem as topic
from lmlab.chapters.attention.measure.compiling import compiler
from lmlab.chapters.attention.measure.problem import Problem, shape_of
from lmlab.chapters.attention.measure.shapes import InModel
from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.chapters.saved_tensors import saved_storages

MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
SHAPE = {"batch": 3, "sequence": 24, "head_dim": 8, "precision": "fp32", "causal": False}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def tensors(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for _ in range(4))


@MASKS
@pytest.mark.parametrize("scores", [2**26, 1000, 1], ids=["one block", "blocks", "row by row"])
@pytest.mark.parametrize("shape", [(1, 70, 8), (2, 3, 33, 16)], ids=["no heads", "heads"])
def test_the_reference_is_autograd_of_the_formula_in_fp64(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], scores: int, causal: bool
) -> None:
    monkeypatch.setattr(topic, "SCORES_PER_BLOCK", scores)
    inputs = tensors(*shape)
    *wide, grad_o = (x.double().requires_grad_() for x in inputs)
    output = naive.attention(*wide, is_causal=causal)
    expected = (output.detach(), *torch.autograd.grad(output, wide, grad_o.detach()))
    found = topic.reference(*inputs, is_causal=causal)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, ...]:
    return topic.reference(*tensors(1, 300, 8), is_causal=True)


@pytest.mark.parametrize("name", topic.NAMES)
@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_one_wrong_tile_fails(expected: tuple[Tensor, ...], name: str, number: float) -> None:
    wrong = [x.clone() for x in expected]
    wrong[topic.NAMES.index(name)][:, 270:290] = number
    with pytest.raises(WrongNumbers, match=name):
        topic.check(topic.errors(wrong, expected), torch.bfloat16)


def test_tf32_does_not_pass_as_fp32(expected: tuple[Tensor, ...]) -> None:
    noise = torch.Generator().manual_seed(1)
    off = [x * (1 + 5e-4 * torch.randn(x.shape, generator=noise)) for x in expected]
    found = topic.errors(off, expected)
    topic.check(found, torch.bfloat16)
    with pytest.raises(WrongNumbers):
        topic.check(found, torch.float32)


@MASKS
def test_flops_follow_the_usual_convention(causal: bool) -> None:
    forward = (4 if causal else 8) * 3 * 24 * 24 * 8 / 2
    flops = shape_of({**SHAPE, "causal": causal}).flops()
    assert flops == {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}


@MASKS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autograd_saves_weights_and_mask(cpu: torch.device, causal: bool, precision: str) -> None:
    asked = {**SHAPE, "causal": causal, "precision": precision}
    problem = Problem(shape_of(asked), cpu, seed=0)
    call = partial(naive.attention, *problem.inputs, is_causal=causal)
    saved = sum(saved_storages(call, problem.inputs).values())
    held = {t: n for stage, t, n in naive_memory.account(asked) if stage == "before_backward"}
    assert saved == held["weights"] + held.get("mask", 0)
    assert ("mask" in held) == causal


def test_peaks_have_two_matrices_of_scores_forward_and_four_backward() -> None:
    sums = {stage: n for stage, tensor, n in naive_memory.account(SHAPE) if tensor == "sum"}
    matrix, vectors = 3 * 24 * 24 * 4, 3 * 24 * 8 * 4
    assert sums["forward_peak"] == 2 * matrix + 5 * vectors
    assert sums["peak"] == 4 * matrix + 6 * vectors


def test_a_models_tensors_have_the_heads_of_a_token_next_to_each_other() -> None:
    shape = shape_of({**SHAPE, "heads": 2})
    plain, in_model = (make(shape, torch.device("cpu"), 0) for make in (Problem, InModel))
    expected = (*plain.inputs, plain.grad_o)
    for x, same in zip((*in_model.inputs, in_model.grad_o), expected, strict=True):
        assert torch.equal(x, same)
        assert x.transpose(1, 2).is_contiguous()
    for x, same in zip(in_model.reference(), plain.reference(), strict=True):
        assert torch.equal(x, same)
    assert all(x.requires_grad and x.is_leaf for x in in_model.inputs)


def test_a_second_compilation_of_a_function_is_an_error() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with compiler():
        compiled(torch.ones(2))
        compiled(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"(?i)recompil"):
            compiled(torch.ones(3))
    compiled(torch.ones(4))


def test_cold_caches_are_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:  # or PyTorch might set its default in the meantime
        monkeypatch.setenv(name, f"/own/{name}")
    with compiler(cold=True):
        folders = [os.environ[name] for name in CACHES]
        assert not any(folder.startswith("/own") for folder in folders)
        Path(folders[0]).mkdir()
    assert not any(map(os.path.exists, folders))
    assert [os.environ[name] for name in CACHES] == [f"/own/{name}" for name in CACHES]


def test_tritons_cache_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"].endswith(".triton/cache")
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with compiler():
        assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
