"""The line that explains an allocation is the innermost of the program's own."""

from __future__ import annotations

import pytest

from lmlab.measure.memory.sources import Source, source_of
from tests.measure.memory.snapshots import frame

OURS = frame("/home/me/lmlab/src/lmlab/model/layers.py", 55, "forward")


@pytest.mark.parametrize(
    "inner",
    [
        "/env/lib/python3.12/site-packages/torch/nn/functional.py",
        "torch/nn/modules/module.py",
        "/home/me/lmlab/src/lmlab/measure/memory/observer.py",
        "lmlab/measure/memory/observer.py",
        "/usr/lib/python3.12/contextlib.py",
        "<string>",
        "",
    ],
)
def test_frames_of_torch_and_of_the_watcher_are_passed_over(inner: str) -> None:
    assert source_of([frame(inner), OURS]) == Source("lmlab/model/layers.py", 55, "forward")


def test_a_package_that_is_installed_is_still_the_program() -> None:
    installed = frame("/env/lib/python3.12/site-packages/lmlab/attention/naive.py", 3, "attention")
    assert source_of([installed]) == Source("lmlab/attention/naive.py", 3, "attention")


def test_a_users_model_is_named_by_its_last_folder() -> None:
    assert source_of([frame("/home/me/project/net.py", 9, "g")]) == Source("project/net.py", 9, "g")


def test_a_stack_of_torch_alone_has_no_source() -> None:
    assert source_of([frame("torch/autograd/graph.py")]) is None
    assert source_of([]) is None
