"""The shapes cover what users have; the summary compares ours with the best other variant."""

from typing import Any

import pytest
import torch

from lmlab.attention import bench
from lmlab.attention.bench import Shape, summarize


def records(times: dict[str, float]) -> list[dict[str, Any]]:
    shape = {"batch": 1, "heads": 2, "sequence": 64, "head_dim": 64, "is_causal": True}
    return [
        shape | {"variant": name, "phase": "forward", "device_us": time, "host_us": 20.0}
        for name, time in times.items()
    ]


def test_ours_is_compared_with_the_best_other_and_with_each_in_the_mean() -> None:
    lines = summarize(
        [*records({"flash": 9.0, "sdpa_cudnn": 10.0, "flex": 18.0}), {"reason": "no such thing"}]
    ).splitlines()

    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:6] == [str(Shape(1, 2, 64, 64)), "forward", "9.0", "10.0", "18.0", "0.90"]
    assert "forward against sdpa_cudnn: 0.900" in lines[-1]
    assert "forward against flex: 0.500" in lines[-1]


def test_the_shapes_are_distinct_and_cover_ragged_lengths_masks_and_head_dims() -> None:
    shapes = bench.SETS["all"]

    assert len(set(shapes)) == len(shapes)
    assert {shape.is_causal for shape in bench.REGRESSION} == {True, False}
    assert {32, 64, 80, 96, 128, 192, 256} == {shape.head_dim for shape in shapes}
    assert any(shape.sequence % 64 for shape in bench.REGRESSION)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main([])
    assert caught.value.code == 2
    assert "a CUDA GPU is needed" in capsys.readouterr().err
