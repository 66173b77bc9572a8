"""Device time of whole steps."""

from statistics import median

import pytest
import torch

from lmlab.measure.busy import PROFILED_STEPS, device_time


def test_a_cpu_has_none() -> None:
    assert device_time(lambda: pytest.fail("it need not run"), torch.device("cpu")) is None


@pytest.mark.gpu
def test_it_is_the_time_of_the_kernels() -> None:
    gpu = torch.device("cuda")
    side = torch.randn(2048, 2048, device=gpu)
    side @ side  # loads the library
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for event in (start, end):
        event.record()
        for _ in range(10):
            side @ side
    torch.cuda.synchronize()
    once = device_time(lambda: side @ side, gpu)
    assert once is not None
    assert len(once.samples_ms) == PROFILED_STEPS
    assert median(once.samples_ms) == pytest.approx(start.elapsed_time(end) / 10, rel=0.2)
    assert device_time(lambda: None, gpu) is None
