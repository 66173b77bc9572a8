"""Each arm has a standing of its own, and the point is ok as long as one arm is."""

from __future__ import annotations

import weakref

import pytest
import torch

from lmlab.chapters.attention.measure.variants import Arms, Capped, WrongNumbers, refuse_unsupported
from lmlab.jobs.outcome import Unsupported

CPU = torch.device("cpu")


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("the compiler met an error")
    outer.__cause__ = error
    return outer


ENDS: dict[str, tuple[Exception, str, str]] = {
    "what a machine lacks": (Unsupported("no such GPU"), "unsupported", "no such GPU"),
    "an arm that would outlast its turn": (Capped("about 9 s"), "capped", "about 9 s"),
    "wrong numbers": (WrongNumbers("output off"), "failed", "output off"),
    "memory": (MemoryError("full"), "oom", "full (cpu)"),
    "memory that the compiler ran out of": (wrapped(MemoryError("full")), "oom", "full (cpu)"),
    "memory that a kernel found full": (
        RuntimeError("Triton Error [CUDA]: out of memory"),
        "oom",
        "Triton Error [CUDA]: out of memory (cpu)",
    ),
    "any other error": (KeyError("q"), "failed", "KeyError: 'q'"),
}


@pytest.mark.parametrize(("error", "status", "reason"), ENDS.values(), ids=ENDS)
def test_an_arm_ends_with_a_status_and_a_reason(error: Exception, status: str, reason: str) -> None:
    arms = Arms(["a", "b"], CPU)
    with arms.attempt("a"):
        raise error
    assert arms.rows["a"] == {"status": status, "reason": reason}
    assert arms.running == ["b"]


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["as it is", "inside another"])
def test_what_an_error_holds_is_free_before_the_arms_are_tidied_up(
    monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fill() -> None:
        scores = torch.empty(3)
        held.append(weakref.ref(scores))
        raise MemoryError("full")

    def fill_inside() -> None:
        try:
            fill()
        except MemoryError as error:
            raise RuntimeError("the compiler met an error") from error

    arms = Arms(["a"], CPU)
    monkeypatch.setattr(arms, "tidy", lambda: alive.append(held[0]() is not None))
    with arms.attempt("a"):
        fill_inside() if is_wrapped else fill()
    assert alive == [False]


def test_an_interrupt_is_nobodys_failure() -> None:
    arms = Arms(["a"], CPU)
    with pytest.raises(KeyboardInterrupt), arms.attempt("a"):
        raise KeyboardInterrupt
    assert arms.running == ["a"]


def test_a_reason_is_one_line() -> None:
    arms = Arms(["a"], CPU)
    arms.stop("a", ValueError("two\nlines"))
    assert arms.rows["a"]["reason"] == "ValueError: two lines"


def test_a_point_is_ok_as_long_as_one_arm_is() -> None:
    arms = Arms(["a", "b"], CPU)
    arms.stop("a", Unsupported("not here"))
    arms.note("b", errors={})
    outcome = arms.outcome({}, {"flops": 1})
    assert outcome.status == "ok"
    assert outcome.data["flops"] == 1
    assert outcome.data["arms"]["a"]["status"] == "unsupported"


@pytest.mark.parametrize(
    ("error", "status"), [(MemoryError("full"), "oom"), (Capped("9 s"), "unsupported")]
)
def test_without_any_arm_the_first_one_speaks_and_the_data_stays(
    error: Exception, status: str
) -> None:
    arms = Arms(["a", "b"], CPU)
    arms.stop("a", error)
    arms.stop("b", Unsupported("not here"))
    outcome = arms.outcome({}, {"flops": 1})
    assert outcome.status == status
    assert outcome.reason is not None
    assert outcome.reason.endswith("; b: not here")
    assert set(outcome.data) == {"flops", "arms"}


def test_the_first_arm_left_running_hides_no_failure() -> None:
    arms = Arms(["a"], CPU)
    with arms.attempt("a"):
        arms.note("a", first_call_s=0.1)
    assert arms.rows["a"] == {"status": "ok", "reason": None, "first_call_s": 0.1}


def test_flash_is_refused_on_a_cpu_and_naive_is_not() -> None:
    refuse_unsupported("naive", CPU, torch.float32, 16)
    with pytest.raises(Unsupported, match="interpreter"):
        refuse_unsupported("flash", CPU, torch.float32, 16)
