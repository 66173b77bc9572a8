"""The machine's id: from its visible GPUs, else from its processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.measure.identity import Machine, cpu_name, find_machine, slug, torch_built_for_cuda

from .fake_nvml import FakeGpu, FakeNvml

EPYC = "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu vme\n"
PROCESSOR = Machine("cpu-amd-epyc-7763", "cpu", "AMD EPYC 7763 64-Core Processor", 0)
GPUS = {"NVIDIA H200": "GPU-aaaa1111", "NVIDIA L4": "GPU-cccc3333"}
H200, L4 = (FakeGpu(name, uuid) for name, uuid in GPUS.items())
H200_TOO = FakeGpu("NVIDIA H200", "GPU-bbbb2222")


def found(nvml: FakeNvml, visible: str | None = None, *, cuda_build: bool = True) -> Machine:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_machine(nvml=nvml, environment=environment, cpuinfo=EPYC, cuda_build=cuda_build)


VISIBLE = {
    "not set": (None, "nvidia-h200", 2),
    "an index": ("1", "nvidia-l4", 1),
    "the order is kept": ("1,0", "nvidia-l4", 1),
    "two of a kind": ("0, 2", "nvidia-h200", 2),
    "a uuid": ("GPU-cccc3333", "nvidia-l4", 1),
    "the beginning of a uuid": ("GPU-bb", "nvidia-h200", 1),
    "cut off at an unknown index": ("0,7,2", "nvidia-h200", 1),
    "empty hides all": ("", PROCESSOR.id, 0),
    "minus one hides all": ("-1", PROCESSOR.id, 0),
    "an ambiguous uuid": ("GPU-", PROCESSOR.id, 0),
    "an unknown slice": ("MIG-1234", PROCESSOR.id, 0),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_the_first_visible_gpu_names_the_machine(case: str) -> None:
    visible, machine, count = VISIBLE[case]
    nvml = FakeNvml(H200, L4, H200_TOO)
    here = found(nvml, visible)
    assert (here.id, here.gpu_count) == (machine, count)
    assert nvml.open_sessions == 0


def test_without_a_usable_gpu_the_processor_names_the_machine() -> None:
    assert found(FakeNvml(library=False)) == found(FakeNvml(H200), cuda_build=False) == PROCESSOR


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("Intel(R) Xeon(R) Platinum 8358 CPU @ 2.60GHz", "cpu-intel-xeon-platinum-8358"),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "cpu-intel-core-i7-9750h"),
        ("Intel(R) Xeon(R) Processor", "cpu-intel-xeon"),
        ("AMD Ryzen 7 PRO 4750U with Radeon Graphics", "cpu-amd-ryzen-7-pro-4750u"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "cpu-amd-ryzen-9-5950x"),
    ],
)
def test_vendor_noise_is_removed_from_a_processors_name(model: str, machine: str) -> None:
    cpuinfo = f"vendor_id\t: x\nmodel name\t: {model}\n"
    here = find_machine(nvml=FakeNvml(library=False), environment={}, cpuinfo=cpuinfo)
    assert (here.id, here.name) == (machine, model)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n", "Arm Neoverse-V1"),
        ("processor\t: 0\nhart\t\t: 1\n", "riscv64"),
    ],
)
def test_a_processor_without_a_model_name(
    cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert cpu_name(cpuinfo) == name


def test_an_id_is_lower_case_with_dashes() -> None:
    assert slug("NVIDIA A100-SXM4-80GB (x)") == "nvidia-a100-sxm4-80gb-x"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("cuda: Optional[str] = None", False), ("cuda = None", False), ("cuda = '13.0'", True)],
)
def test_a_cuda_build_is_recognized_by_its_version_file(
    line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip = 'x'\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert torch_built_for_cuda() is expected


def test_identifying_the_machine_agrees_with_torch_without_importing_it() -> None:
    code = (
        "import sys; from lmlab.measure.identity import find_machine, torch_built_for_cuda;"
        "find_machine(); said = torch_built_for_cuda(); assert 'torch' not in sys.modules;"
        "import torch; sys.exit(said != (torch.version.cuda is not None))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
