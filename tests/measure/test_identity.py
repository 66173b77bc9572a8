"""A machine's name: from its GPUs as the environment shows them, else from its processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.measure.identity import Machine, cpu_name, find_machine, slug, torch_built_for_cuda

from .fake_nvml import FakeGpu, FakeNvml

EPYC = "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu vme\n"
H200 = FakeGpu("NVIDIA H200", "GPU-aaaa1111")
H200_TOO = FakeGpu("NVIDIA H200", "GPU-bbbb2222")
L4 = FakeGpu("NVIDIA L4", "GPU-cccc3333")


def found(nvml: FakeNvml, visible: str | None = None) -> Machine:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_machine(nvml=nvml, environment=environment, cpuinfo=EPYC, cuda_build=True)


def test_a_gpu_gives_the_machine_its_name() -> None:
    assert found(FakeNvml(H200)) == Machine("nvidia-h200", "cuda", "NVIDIA H200", 1)


def test_gpus_of_the_first_ones_kind_are_counted() -> None:
    assert found(FakeNvml(H200, H200_TOO, L4)).gpu_count == 2


@pytest.mark.parametrize(
    ("visible", "machine", "count"),
    [
        pytest.param("1", "nvidia-l4", 1, id="index"),
        pytest.param("1,0", "nvidia-l4", 1, id="order-is-kept"),
        pytest.param("0, 2", "nvidia-h200", 2, id="two-of-a-kind"),
        pytest.param("GPU-cccc3333", "nvidia-l4", 1, id="uuid"),
        pytest.param("GPU-bb", "nvidia-h200", 1, id="beginning-of-a-uuid"),
        pytest.param("0,7,2", "nvidia-h200", 1, id="cut-off-at-an-unknown-index"),
        pytest.param("", "cpu-amd-epyc-7763", 0, id="empty-hides-all"),
        pytest.param("-1", "cpu-amd-epyc-7763", 0, id="minus-one-hides-all"),
        pytest.param("GPU-", "cpu-amd-epyc-7763", 0, id="ambiguous-uuid"),
        pytest.param("MIG-1234", "cpu-amd-epyc-7763", 0, id="unknown-slice"),
    ],
)
def test_cuda_visible_devices_is_honoured(visible: str, machine: str, count: int) -> None:
    here = found(FakeNvml(H200, L4, H200_TOO), visible)
    assert (here.id, here.gpu_count) == (machine, count)


def test_without_nvml_the_processor_gives_the_name() -> None:
    here = found(FakeNvml(library=False))
    assert here == Machine("cpu-amd-epyc-7763", "cpu", "AMD EPYC 7763 64-Core Processor", 0)


def test_a_gpu_that_the_installed_torch_cannot_use_does_not_count() -> None:
    here = find_machine(nvml=FakeNvml(H200), environment={}, cpuinfo=EPYC, cuda_build=False)
    assert here.device == "cpu"


def test_the_nvml_session_is_closed_again() -> None:
    nvml = FakeNvml(H200)
    found(nvml)
    assert nvml.open_sessions == 0


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
def test_a_processors_name_loses_its_noise(model: str, machine: str) -> None:
    cpuinfo = f"vendor_id\t: x\nmodel name\t: {model}\n"
    here = find_machine(nvml=FakeNvml(library=False), environment={}, cpuinfo=cpuinfo)
    assert (here.id, here.name) == (machine, model)


def test_an_arm_processor_is_known_by_its_part_number() -> None:
    cpuinfo = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n"
    assert cpu_name(cpuinfo) == "Arm Neoverse-V1"


def test_an_unknown_processor_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert cpu_name("processor\t: 0\nhart\t\t: 1\n") == "riscv64"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
    ],
)
def test_a_slug_is_lower_case_with_dashes(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_the_version_file_tells_what_torch_itself_tells() -> None:
    import torch

    assert torch_built_for_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("cuda: Optional[str] = None", False), ("cuda = None", False), ("cuda = '13.0'", True)],
)
def test_a_cuda_build_is_read_off_its_version_file(
    line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip = 'x'\n")
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda _: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}),
    )
    assert torch_built_for_cuda() is expected


def test_naming_the_machine_imports_no_torch() -> None:
    code = (
        "import sys; from lmlab.measure.identity import find_machine; find_machine();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
