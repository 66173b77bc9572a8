"""The line that explains an allocation: the innermost one of the program itself."""

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
def test_frames_of_torch_and_of_the_recorder_are_skipped(inner: str) -> None:
    assert source_of([frame(inner), OURS]) == Source("lmlab/model/layers.py", 55, "forward")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/env/lib/python3.12/site-packages/lmlab/attention/naive.py", "lmlab/attention/naive.py"),
        ("/home/me/project/net.py", "project/net.py"),
    ],
)
def test_files_are_shown_relative_to_their_package(path: str, shown: str) -> None:
    assert source_of([frame(path, 9, "g")]) == Source(shown, 9, "g")


def test_a_stack_of_torch_alone_has_no_source() -> None:
    assert source_of([frame("torch/autograd/graph.py")]) is None
