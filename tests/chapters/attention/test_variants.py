"""Every variant has its own status, and a point is ok as long as one variant is."""

import math
import weakref

import pytest
import torch

from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers
from lmlab.jobs.outcome import Unsupported
from tests.chapters.pages import found, value_of

CPU = torch.device("cpu")


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("the compiler met an error")
    outer.__cause__ = error
    return outer


ENDS: dict[str, tuple[Exception, str, str]] = {
    "wrong numbers": (WrongNumbers("output 0.5"), "failed", "output 0.5"),
    "memory of the compiler": (wrapped(MemoryError("full")), "oom", "full (cpu)"),
    "memory of a kernel": (
        RuntimeError("Triton Error [CUDA]: out of memory"),
        "oom",
        "Triton Error [CUDA]: out of memory (cpu)",
    ),
    "any other error, in one line": (ValueError("two\nlines"), "failed", "ValueError: two lines"),
}


@pytest.mark.parametrize(("error", "status", "reason"), ENDS.values(), ids=ENDS)
def test_an_error_becomes_a_record(error: Exception, status: str, reason: str) -> None:
    variants = Variants({"a": {"block_m": 64}, "b": {}}, CPU)
    with variants.attempt("a"):
        raise error
    (record,) = variants.records
    assert (record["quantity"], record["status"], record["reason"]) == ("time", status, reason)
    assert record["labels"] == {"variant": "a", "block_m": 64}
    assert variants.running == ["b"]


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
def test_failed_variants_free_tensors(monkeypatch: pytest.MonkeyPatch, is_wrapped: bool) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fill() -> None:
        scores = torch.empty(3)
        held.append(weakref.ref(scores))
        raise MemoryError("full")

    variants = Variants(["a"], CPU)
    path = "lmlab.chapters.attention.measure.variants.free_memory"
    monkeypatch.setattr(path, lambda device: alive.append(held[0]() is not None))
    with variants.attempt("a"):
        try:
            fill()
        except MemoryError as error:
            if not is_wrapped:
                raise
            raise RuntimeError("the compiler met an error") from error
    assert alive == [False]


def test_an_interrupt_is_not_a_failure() -> None:
    variants = Variants(["a"], CPU)
    with pytest.raises(KeyboardInterrupt), variants.attempt("a"):
        raise KeyboardInterrupt
    assert variants.running == ["a"]


def test_a_point_is_ok_as_long_as_one_variant_is_and_the_first_decides_otherwise() -> None:
    variants = Variants(["a", "b"], CPU)
    variants.stop("a", Unsupported("not here"))
    variants.note("b", "error", 0.5, "", tensor="output")
    variants.note("b", "error", math.nan, "", tensor="grad_q")
    variants.note("b", "peak_memory", None, "B")
    outcome = variants.outcome({"quantity": "flops", "labels": {}})
    assert outcome.status == "ok"
    assert value_of(outcome, "error", variant="b") == 0.5
    assert len(found(outcome, "flops")) == 1
    assert found(outcome, "peak_memory") == []
    variants.stop("b", MemoryError("full"))
    outcome = variants.outcome()
    assert (outcome.status, outcome.reason) == ("unsupported", "a: not here; b: full (cpu)")
    assert not outcome.measurements
