"""The kernels compile for every architecture, fit its shared memory and do not spill.

Launches go to a fake GPU (`conftest`), which compiles as a real one would: Triton needs no GPU.
"""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from lmlab.kernels import launch
from lmlab.kernels.configs import look_up, shared_bytes
from lmlab.kernels.problem import Direction, Problem
from tests.kernels.conftest import FakeGpu

pytestmark = pytest.mark.slow

FEW = 64  # bytes that a warp-specialized kernel may spill, outside of its long loop


class Launch(NamedTuple):
    """A problem for which `tile_sizes` selects a certain kernel."""

    architecture: str
    direction: Direction
    head_dim: int
    kernels: list[str]
    heads: int = 16
    length: int = 16384
    group: int = 1
    is_causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    spills: tuple[int, int] = 0, 0  # by the assembler of CUDA 12 and of 13


FORWARD, BACKWARD, DELTA = "flash_forward_kernel", "flash_backward_kernel", "delta_kernel"
DKDV, WIDE, DQ = "flash_bwd_dkdv_kernel", "flash_bwd_dkdv_wide_kernel", "flash_bwd_dq_kernel"
FUSED, FORWARD_WS = "flash_bwd_fused_kernel", "flash_fwd_hopper_kernel"
LAUNCHES = [
    Launch("ampere", "backward", 64, [DELTA, BACKWARD]),
    Launch("ada", "forward", 64, [FORWARD]),
    Launch("blackwell", "forward", 64, [FORWARD]),
    Launch("hopper", "forward", 64, [FORWARD_WS], spills=(FEW, 208)),
    Launch("hopper", "forward", 128, [FORWARD_WS], spills=(FEW, 160)),
    Launch("hopper", "forward", 256, [FORWARD_WS], spills=(FEW, 128)),
    Launch("hopper", "backward", 64, [DELTA, FUSED], spills=(FEW, FEW)),
    Launch("hopper", "backward", 64, [DELTA, FUSED], 2, is_causal=False, spills=(FEW, FEW)),
    *(Launch("hopper", "backward", d, [DELTA, DQ, WIDE], spills=(FEW, FEW)) for d in (192, 256)),
    Launch("hopper", "backward", 192, [DELTA, BACKWARD], group=4, spills=(FEW, 408)),
    Launch("hopper", "backward", 128, [DELTA, DKDV, DQ], spills=(FEW, FEW)),
    Launch("hopper", "backward", 64, [DELTA, DKDV, DQ], 2, spills=(FEW, FEW)),
    Launch("hopper", "backward", 64, [BACKWARD], heads=1, length=512, spills=(0, 48)),
    Launch("hopper", "forward", 64, [FORWARD], dtype=torch.float32),
    Launch("hopper", "backward", 16, ["decompose_kernel", BACKWARD], dtype=torch.float32),
]


@pytest.mark.parametrize("case", LAUNCHES, ids=str)
def test_kernels_fit_and_do_not_spill(case: Launch, gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.become(case.architecture)
    q, o, grad_o, k, v = (
        torch.empty(1, case.heads // group, case.length, case.head_dim, dtype=case.dtype)
        for group in (1, 1, 1, case.group, case.group)
    )
    options: dict[str, Any] = {"is_causal": case.is_causal, "scale": 0.125}
    if case.direction == "forward":
        launch.forward(q, k, v, **options)
    else:
        launch.backward(grad_o, q, k, v, o, torch.empty(o.shape[:3]), **options)
    assert [name for name, _ in gpu.compiled] == case.kernels
    problem = Problem.of(q, k, case.is_causal, case.direction)
    tiles = look_up(problem)
    allowed = case.spills[float(get_ptxas(90).version) >= 13]
    for name, kernel in gpu.compiled:
        assert spilled_bytes(kernel, tmp_path) <= allowed
        if name in (DELTA, "decompose_kernel"):
            continue
        assert kernel.metadata.shared <= shared_bytes(problem, tiles)
        code = kernel.asm["ptx"]
        if case.architecture == "hopper":
            resident, _ = tiles.rows(case.direction)
            assert ("wgmma.mma_async" in code) == (resident >= 64)
        assert ("cp.async.bulk.tensor" in code) == (tiles.tma or tiles.warp_specialized)
        assert ("red.relaxed.gpu.global.add.v4.f32" in code) == ("fused" in name)
        overlaps = name in case.kernels[2:]
        assert kernel.metadata.launch_pdl == overlaps <= ("griddepcontrol.wait" in code)
        if tiles.warp_specialized:
            assert "serialized" not in assembler_report(code, tmp_path)


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Stack bytes per thread, which these kernels use for spilled registers only."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    options = ["--dump-resource-usage", folder / "kernel.cubin"]
    report = run_tool(triton.knobs.nvidia.cuobjdump, *options).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found, report
    return int(found[1])


def assembler_report(code: str, folder: Path) -> str:
    """What ptxas says, for example that it had to serialize asynchronous products."""
    (folder / "kernel.ptx").write_text(code)
    options = ["-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.o"]
    report = run_tool(get_ptxas(90), *options).stderr
    assert "registers" in report
    return report


def run_tool(tool: Any, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """A tool of CUDA's, the one that Triton itself runs."""
    words = [tool.path, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=True)
