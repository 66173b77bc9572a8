"""The kernels compile for every architecture without a GPU and fit its shared memory.

Triton needs no GPU to compile. The host code launches on a fake GPU (`conftest`), so that kernels
are compiled exactly as a launch would: the estimate of shared memory is never below what the
compiler takes, registers do not spill, and products on Hopper stay asynchronous.
"""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from lmlab.kernels import launch
from lmlab.kernels.configs import Direction, look_up, shared_bytes
from lmlab.kernels.problem import Problem
from tests.kernels.conftest import FakeGpu

pytestmark = pytest.mark.slow

D128_SPILLS = 256
"""Bytes that the fused backward at head dimension 128 may spill, mostly around the diagonal."""
FEW = 64
"""Bytes that a warp-specialized kernel may spill, outside of its long loop."""


class Launch(NamedTuple):
    """A causal problem for which `tile_sizes` selects a certain kernel."""

    architecture: str
    direction: Direction
    head_dim: int
    kernels: list[str]
    heads: int = 16
    length: int = 16384
    dtype: torch.dtype = torch.bfloat16
    spills: int = 0


FORWARD, BACKWARD, DELTA = "flash_forward_kernel", "flash_backward_kernel", "delta_kernel"
DKDV = "flash_bwd_dkdv_kernel"
LAUNCHES = [
    Launch("ampere", "backward", 64, [DELTA, BACKWARD]),
    Launch("ada", "forward", 64, [FORWARD]),
    Launch("blackwell", "forward", 64, [FORWARD]),
    Launch("hopper", "forward", 64, ["flash_fwd_hopper_kernel"], spills=FEW),
    Launch("hopper", "forward", 128, ["flash_fwd_hopper_kernel"], spills=FEW),
    Launch("hopper", "forward", 256, ["flash_fwd_hopper_kernel"], spills=FEW),
    Launch("hopper", "backward", 64, [DELTA, "flash_bwd_fused_kernel"], spills=FEW),
    Launch("hopper", "backward", 256, [DELTA, DKDV, DKDV, "flash_bwd_dq_kernel"], spills=FEW),
    Launch("hopper", "backward", 128, [DELTA, "flash_bwd_fused_d128_kernel"], spills=D128_SPILLS),
    Launch("hopper", "backward", 64, [DELTA, DKDV, "flash_bwd_dq_kernel"], 2, spills=FEW),
    Launch("hopper", "backward", 64, [BACKWARD], heads=1, length=512),
    Launch("hopper", "forward", 64, [FORWARD], dtype=torch.float32),
    Launch("hopper", "backward", 16, ["decompose_kernel", BACKWARD], dtype=torch.float32),
]


def identify(case: Launch) -> str:
    return f"{case.architecture}-{case.direction}-{case.head_dim}-{case.kernels[-1]}"


@pytest.mark.parametrize("case", LAUNCHES, ids=identify)
def test_kernels_fit_and_do_not_spill(case: Launch, gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.become(case.architecture)
    q, k, v, o, grad_o = (
        torch.empty(1, case.heads, case.length, case.head_dim, dtype=case.dtype) for _ in range(5)
    )
    options: dict[str, Any] = {"is_causal": True, "scale": 0.125}
    if case.direction == "forward":
        launch.forward(q, k, v, **options)
    else:
        launch.backward(grad_o, q, k, v, o, torch.empty(o.shape[:3]), **options)

    assert [name for name, _ in gpu.compiled] == case.kernels
    problem = Problem.of(q, k, True).case(case.direction)
    tiles = look_up(problem)
    for name, kernel in gpu.compiled:
        assert spilled_bytes(kernel, tmp_path) <= case.spills
        if name in (DELTA, "decompose_kernel"):
            continue
        assert kernel.metadata.shared <= shared_bytes(problem, tiles)
        code = kernel.asm["ptx"]
        if case.architecture == "hopper":
            resident, _ = tiles.rows(case.direction)
            assert ("wgmma.mma_async" in code) == (resident >= 64)
        assert ("cp.async.bulk.tensor" in code) == (tiles.tma or tiles.warp_specialized)
        assert ("red.relaxed.gpu.global.add.v4.f32" in code) == ("fused" in name)
        if tiles.warp_specialized:
            assert "serialized" not in assembler_report(code, tmp_path)


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Stack bytes per thread, which these kernels use for spilled registers only."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    report = run_tool("cuobjdump", "--dump-resource-usage", folder / "kernel.cubin").stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found, report
    return int(found[1])


def assembler_report(code: str, folder: Path) -> str:
    """What ptxas says, for example that it had to serialize asynchronous products."""
    (folder / "kernel.ptx").write_text(code)
    options = ["-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.o"]
    report = run_tool("ptxas", *options).stderr
    assert "registers" in report
    return report


def run_tool(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
