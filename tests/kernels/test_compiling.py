"""The kernels compile for every architecture without a GPU at hand, within its shared memory.

Triton needs no GPU to compile, only to run. What is checked: that each architecture takes the
kernels, that the count of shared memory is never below what the compiler takes, and that the tiles
of the benchmark's shapes spill no registers.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from lmlab.kernels.configs import (
    Case,
    Direction,
    Row,
    Tiles,
    look_up,
    power_of_two,
    rows,
    shared_bytes,
)
from lmlab.kernels.flash_backward import flash_backward_kernel
from lmlab.kernels.flash_forward import flash_forward_kernel
from lmlab.kernels.hopper_forward import hopper_forward_kernel
from lmlab.kernels.hopper_keys import hopper_keys_kernel
from lmlab.kernels.hopper_once import hopper_once_kernel
from lmlab.kernels.hopper_queries import hopper_queries_kernel
from lmlab.kernels.hopper_wide import hopper_wide_kernel

pytestmark = pytest.mark.slow

CAPABILITY = {"ampere": 80, "ada": 89, "hopper": 90, "blackwell": 100}
STRIDES = ("i32", "i32", "i32")
ALIGNED = [["tt.divisibility", 16]]


def case_of(direction: Direction, architecture: str, bits: int, head_dim: int) -> Case:
    """Sixteen heads of a long sequence under a causal mask."""
    return Case(
        direction=direction,
        architecture=architecture,
        bits=bits,
        head_dim=head_dim,
        is_causal=True,
        sequence=16384,
        rows=16 * 16384,
    )


def signature(kernel: Any, case: Case, tiles: Tiles) -> dict[str, Any]:
    """The type of each argument, as a launch would find it."""
    element = "bf16" if case.bits == 16 else "fp32"
    block_d = power_of_two(case.head_dim)

    def of(name: str) -> Any:
        if name.endswith("_strides"):
            return STRIDES
        if name in ("lse", "delta", "parts"):
            return "*fp32"
        if name in ("scale", "scale_log2"):
            return "fp32"
        if name == "arrivals":
            return "*i32"
        if name in ("q", "k", "v", "grad_o") and tiles.descriptors:
            rows = tiles.kept if (case.direction, name) == ("forward", "q") else tiles.walked
            kind = "bf16" if tiles.parts > 1 else element
            return f"tensordesc<{kind}[1,1,{rows},{block_d}]>"
        is_input = name in ("q", "k", "v", "grad_o") or "kept" in name
        if is_input and tiles.parts > 1:
            return "*bf16"
        is_tensor = is_input or name == "o" or name.startswith("grad_")
        return f"*{element}" if is_tensor else "i32"

    return {name: of(name) for name in kernel.arg_names}


def constants(case: Case, tiles: Tiles) -> dict[str, Any]:
    shared = {
        "KEPT": tiles.kept,
        "WALKED": tiles.walked,
        "BLOCK_D": power_of_two(case.head_dim),
        "HEAD_DIM": case.head_dim,
        "IS_CAUSAL": True,
        "RAGGED_QUERIES": False,
        "RAGGED_KEYS": False,
        "PRECISION": "ieee" if tiles.parts > 1 else tiles.products,
        "DESCRIPTOR": tiles.descriptors,
    }
    if case.direction == "forward":
        return shared | {"SPLITS": 1, "PERSISTENT": False}
    own_delta = {"OWN_DELTA": tiles.own_delta}
    return shared | own_delta | {"PAIRED": True, "group": 1, "PARTS": tiles.parts, "SPLITS": 1}


def compiled(case: Case, tiles: Tiles, **launched: Any) -> Any:
    kernel: Any = flash_forward_kernel if case.direction == "forward" else flash_backward_kernel
    fixed = constants(case, tiles) | launched
    types = signature(kernel, case, tiles) | dict.fromkeys(fixed, "constexpr")
    names = list(types)
    aligned: dict[tuple[int, ...], Any] = {}
    for index, (name, kind) in enumerate(types.items()):
        if kind == STRIDES:
            aligned |= {(index, inner): ALIGNED for inner in range(3)}
        elif kind.startswith("*") or name in ("queries", "keys"):
            aligned[(index,)] = ALIGNED
    source = ASTSource(
        kernel, types, {(names.index(name),): value for name, value in fixed.items()}, aligned
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", CAPABILITY[case.architecture], 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Bytes of stack that one thread takes because its registers did not suffice."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found, report
    return int(found[1])


@pytest.mark.parametrize(
    ("architecture", "direction", "head_dim"),
    [
        ("ampere", "backward", 64),
        ("ada", "forward", 64),
        ("hopper", "forward", 64),
        ("hopper", "backward", 64),
        ("hopper", "backward", 128),
        ("blackwell", "backward", 64),
    ],
)
def test_the_tables_choice_compiles_fits_and_spills_nothing(
    architecture: str, direction: Direction, head_dim: int, tmp_path: Path
) -> None:
    case = case_of(direction, architecture, 16, head_dim)
    tiles = look_up(case)
    if tiles.specialised:
        tiles = tiles.plain()

    kernel = compiled(case, tiles)

    assert kernel.metadata.shared <= shared_bytes(case, tiles)
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fp32_by_three_products_is_counted_rightly(direction: Direction) -> None:
    case = case_of(direction, "hopper", 32, 64)
    tiles = Tiles(kept=64, walked=32, warps=4, stages=2, products="tf32x3")

    assert compiled(case, tiles).metadata.shared <= shared_bytes(case, tiles)


def test_fp32_in_parts_is_counted_rightly_and_multiplied_by_warp_groups() -> None:
    case = case_of("backward", "hopper", 32, 128)
    tiles = look_up(case)
    assert tiles.parts > 1

    kernel = compiled(case, tiles)

    assert kernel.metadata.shared <= shared_bytes(case, tiles)
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.bits} bit, {row.head_dim}, {row.sequence}, {row.rows}")
        for row in rows()
        if row.tiles.own_delta
    ],
)
def test_a_delta_of_its_own_is_counted_rightly(row: Row) -> None:
    case = case_of("backward", "hopper", row.bits, row.head_dim)

    # As one head is launched: keys and queries apart, walks shared out.
    kernel = compiled(case, row.tiles, PAIRED=False, SPLITS=4)

    assert kernel.metadata.shared <= shared_bytes(case, row.tiles)


@pytest.mark.parametrize(("head_dim", "kept"), [(64, 64), (128, 32)])
def test_a_delta_of_its_own_spills_nothing_where_one_program_does_keys_and_queries(
    head_dim: int, kept: int, tmp_path: Path
) -> None:
    case = case_of("backward", "hopper", 16, head_dim)
    tiles = Tiles(kept=kept, walked=64, warps=4, stages=3, own_delta=True)

    kernel = compiled(case, tiles)

    assert kernel.metadata.shared <= shared_bytes(case, tiles)
    assert spilled_bytes(kernel, tmp_path) == 0


def test_hopper_multiplies_by_warp_groups_and_copies_by_engine() -> None:
    case = case_of("forward", "hopper", 16, 128)
    tiles = Tiles(kept=128, walked=64, warps=8, stages=3, descriptors=True)

    code = compiled(case, tiles).asm["ptx"]

    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor" in code


def tile_type(rows: int, head_dim: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], gl.bfloat16)
    return f"tensordesc<bf16[1,1,{rows},{head_dim}],{layout!r}>"


def row_type(length: int) -> str:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return f"tensordesc<fp32[1,1,{length}],{layout!r}>"


def specialised_types(kernel: Any, head_dim: int, walked: int) -> dict[str, Any]:
    """The types of a specialised kernel's arguments; kept tiles have 64 rows for each group."""
    walks_queries = kernel in (hopper_keys_kernel, hopper_once_kernel, hopper_wide_kernel)
    kept = tile_type(64, head_dim)
    moving = tile_type(walked, head_dim)
    numbers = row_type(walked) if walks_queries else "*fp32"
    types: dict[str, Any] = {
        "q": moving if walks_queries else kept,
        "grad_o": moving if walks_queries else kept,
        "k": kept if walks_queries else moving,
        "v": kept if walks_queries else moving,
        "lse": "*fp32" if kernel is hopper_forward_kernel else numbers,
        "delta": numbers,
    }
    types |= dict.fromkeys(("o", "grad_q", "grad_k", "grad_v"), "*bf16")
    types |= dict.fromkeys(("scale", "scale_log2"), "fp32") | {"sums": "*fp32", "progress": "*i32"}
    return {
        name: STRIDES if name.endswith("_strides") else types.get(name, "i32")
        for name in kernel.arg_names
    }


WIDE_SPILLS = 256
"""Bytes that one walk at head dimension 128 may spill, which it does mostly around the diagonal."""


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("kernel", "head_dim", "groups", "walked", "stages"),
    [
        pytest.param(hopper_forward_kernel, 64, 3, 128, 2, id="forward, 64"),
        pytest.param(hopper_forward_kernel, 128, 2, 128, 2, id="forward, 128"),
        pytest.param(hopper_keys_kernel, 64, 2, 64, 3, id="gradients of keys, 64"),
        pytest.param(hopper_queries_kernel, 128, 2, 64, 2, id="gradient of queries, 128"),
        pytest.param(hopper_once_kernel, 64, 2, 64, 3, id="all gradients, 64"),
        pytest.param(hopper_wide_kernel, 128, 2, 64, 2, id="all gradients, 128"),
    ],
)
def test_specialised_warps_fit_hardly_spill_and_do_not_wait_for_each_product(
    kernel: Any,
    head_dim: int,
    groups: int,
    walked: int,
    stages: int,
    is_causal: bool,
    tmp_path: Path,
) -> None:
    fixed = {
        "CONSUMERS": groups,
        "WALKED": walked,
        "BLOCK_D": head_dim,
        "HEAD_DIM": head_dim,
        "IS_CAUSAL": is_causal,
        "STAGES": stages,
    }
    types = specialised_types(kernel, head_dim, walked) | dict.fromkeys(fixed, "constexpr")
    names = list(types)
    source = GluonASTSource(
        kernel, types, {(names.index(name),): value for name, value in fixed.items()}, {}
    )

    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

    assert spilled_bytes(built, tmp_path) <= (WIDE_SPILLS if kernel is hopper_wide_kernel else 0)
    case = case_of(
        "backward" if kernel is not hopper_forward_kernel else "forward", "hopper", 16, head_dim
    )
    once = kernel in (hopper_once_kernel, hopper_wide_kernel)
    cut = Tiles(
        kept=64 * groups, walked=walked, warps=8, stages=stages, specialised=True, once=once
    )
    assert built.metadata.shared <= shared_bytes(case, cut)
    assert "serialized" not in assembler_report(built.asm["ptx"], tmp_path)
    assert ("red.relaxed.gpu.global.add.v4.f32" in built.asm["ptx"]) == once


def assembler_report(code: str, folder: Path) -> str:
    (folder / "kernel.ptx").write_text(code)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [tool, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.o"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "registers" in finished.stderr
    return finished.stderr
