"""The line that explains an allocation: the innermost one of the program itself."""

from __future__ import annotations

import pytest

from lmlab.measure.memory.sources import source_of
from tests.measure.memory.snapshots import frame

OURS = "lmlab/model/layers.py"


@pytest.mark.parametrize(
    ("inner", "shown"),
    [
        ("/env/lib/python3.12/site-packages/torch/nn/functional.py", OURS),
        ("torch/nn/modules/module.py", OURS),
        ("/home/me/lmlab/src/lmlab/measure/memory/observer.py", OURS),
        ("lmlab/measure/memory/observer.py", OURS),
        ("/usr/lib/python3.12/contextlib.py", OURS),
        ("<string>", OURS),
        ("", OURS),
        ("/env/lib/python3.12/site-packages/lmlab/attention/naive.py", "lmlab/attention/naive.py"),
        ("/home/me/project/net.py", "project/net.py"),
    ],
)
def test_frames_of_torch_and_of_the_recorder_are_skipped(inner: str, shown: str) -> None:
    outer = frame("/home/me/lmlab/src/lmlab/model/layers.py")
    found = source_of([frame(inner), outer])
    assert found is not None
    assert found.file == shown
    assert source_of([] if shown != OURS else [frame(inner)]) is None
