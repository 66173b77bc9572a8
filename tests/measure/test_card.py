"""The machine: its id, card, vendor peaks, measured ceilings, versions, commit; nothing guessed."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import lmlab
from lmlab.measure import ceilings, identity
from lmlab.measure.card import gpu_limits, machine_card, nvml_facts
from lmlab.measure.ceilings import Plan, copy_ceiling, matmul_ceiling
from lmlab.measure.environment import commit, versions
from lmlab.measure.identity import Machine, find_machine, torch_built_for_cuda
from lmlab.measure.peaks import known_devices, peaks_of
from tests.measure.fake_nvml import FakeGpu, FakeNvml
from tests.processes import git

Find = Callable[..., Machine]
EPYC = "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu vme\n"
PROCESSOR = Machine("cpu-amd-epyc-7763", "cpu", "AMD EPYC 7763 64-Core Processor", 0)
H200, H200_TOO = FakeGpu(), FakeGpu(uuid="GPU-bbbb2222")
L4 = FakeGpu("NVIDIA L4", "GPU-cccc3333")


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """What identifies a machine with that NVML, processor and environment."""

    def find(
        nvml: FakeNvml, visible: str | None = None, cpuinfo: str = EPYC, cuda_build: bool = True
    ) -> Machine:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(identity, "CPUINFO", tmp_path / "cpuinfo")
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(identity, "torch_built_for_cuda", lambda: cuda_build)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return find_machine()

    return find


VISIBLE = {
    "not set": (None, "nvidia-h200", 2),
    "in the given order": ("1,0", "nvidia-l4", 1),
    "two of a kind": ("0, 2", "nvidia-h200", 2),
    "the beginning of a uuid": ("GPU-bb", "nvidia-h200", 1),
    "cut off at an unknown index": ("0,7,2", "nvidia-h200", 1),
    "empty hides all": ("", PROCESSOR.id, 0),
    "minus one hides all": ("-1", PROCESSOR.id, 0),
    "an ambiguous uuid": ("GPU-", PROCESSOR.id, 0),
    "an unknown slice": ("MIG-1234", PROCESSOR.id, 0),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_the_first_visible_gpu_names_the_machine(case: str, found: Find) -> None:
    visible, machine, count = VISIBLE[case]
    nvml = FakeNvml(H200, L4, H200_TOO)
    here = found(nvml, visible)
    assert (here.id, here.gpu_count) == (machine, count)
    assert nvml.open_sessions == 0


def test_without_a_usable_gpu_the_processor_names_the_machine(found: Find) -> None:
    assert found(FakeNvml(library=False)) == found(FakeNvml(H200), cuda_build=False) == PROCESSOR


MODELS = {
    "Intel(R) Xeon(R) Platinum 8358 CPU @ 2.60GHz": "cpu-intel-xeon-platinum-8358",
    "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz": "cpu-intel-core-i7-9750h",
    "Intel(R) Xeon(R) Processor": "cpu-intel-xeon",
    "AMD Ryzen 7 PRO 4750U with Radeon Graphics": "cpu-amd-ryzen-7-pro-4750u",
    "AMD Ryzen 9 5950X 16-Core Processor": "cpu-amd-ryzen-9-5950x",
}


def test_a_processor_is_named_by_its_model(found: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu = FakeNvml(library=False)
    for model, machine in MODELS.items():
        here = found(no_gpu, cpuinfo=f"vendor_id\t: x\nmodel name\t: {model}\n")
        assert (here.id, here.name) == (machine, model)
    arm = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n"
    assert found(no_gpu, cpuinfo=arm).name == "Arm Neoverse-V1"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert found(no_gpu, cpuinfo="processor\t: 0\nhart\t\t: 1\n").name == "riscv64"


BUILDS = {"cuda: Optional[str] = None": False, "cuda = None": False, "cuda = '13.0'": True}


def test_a_cuda_build_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_built_for_cuda() is (torch.version.cuda is not None)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    for line, expected in BUILDS.items():
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip = 'x'\n")
        assert torch_built_for_cuda() is expected


GPU_ONLY = {
    *("sms", "warp_size", "registers_per_sm", "registers_per_block", "l2_bytes", "memory_bytes"),
    *("shared_memory_per_sm_bytes", "shared_memory_per_block_bytes", "compute_capability"),
    *("shared_memory_per_block_optin_bytes", "driver", "clocks_mhz_sm", "power_limit_w"),
}


def test_a_cpus_card_describes_the_processor_and_has_no_gpu_fields() -> None:
    card = json.loads(json.dumps(machine_card(torch.device("cpu"))))
    assert (card["device"], card["name"]) == ("cpu", card["cpu_model"])
    assert 1 <= card["cpu_usable_cores"] <= card["cpu_logical_cores"]
    assert card["cpu_memory_bytes"] > 2**28
    assert not GPU_ONLY & set(card)


def test_the_card_leaves_out_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"name": "Test GPU", "sms": 132, "power_limit_w": None}
    monkeypatch.setattr("lmlab.measure.card._gpu_facts", lambda device: facts)
    card = machine_card(torch.device("cuda"))
    assert (card["sms"], "power_limit_w" in card) == (132, False)


def test_what_torch_or_nvml_does_not_report_is_none() -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32)
    limits = gpu_limits(properties)
    assert (limits["sms"], limits["warp_size"], limits["compute_capability"]) == (132, 32, "9.0")
    assert limits["registers_per_sm"] is None
    assert nvml_facts(FakeNvml(), FakeGpu(sm_clock=345)) == {
        **{"driver": "580.1", "clocks_mhz_sm": 345, "clocks_mhz_memory": 3201},
        **{"clocks_mhz_sm_max": 1980, "clocks_mhz_memory_max": 3201, "power_limit_w": 700.0},
    }
    facts = nvml_facts(FakeNvml(), FakeGpu(unanswered={"clock", "power_limit"}))
    assert (facts["clocks_mhz_sm"], facts["power_limit_w"]) == (None, None)


@pytest.mark.gpu
def test_a_gpus_card_is_complete() -> None:
    card = json.loads(json.dumps(machine_card(torch.device("cuda", 0))))
    assert set(card) >= GPU_ONLY
    assert (card["gpu_count"] >= 1, card["name"]) == (True, torch.cuda.get_device_name(0))


UNKNOWN = ["", "NVIDIA H2000", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU"]
UNKNOWN += ["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "AMD EPYC 7763 64-Core Processor"]


def test_an_h200_has_the_figures_of_its_datasheet_and_an_unknown_device_none() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is not None
    assert peaks["tflops"] == {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}
    assert peaks["memory_tb_per_s"] == 4.8
    assert [peaks_of(name) for name in UNKNOWN] == [None] * len(UNKNOWN)


@pytest.mark.parametrize("name", known_devices())
def test_every_known_device_is_unique_complete_and_sourced(name: str) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert known_devices().count(name) == 1
    assert set(peaks["tflops"]) == {"fp32", "tf32", "fp16", "bf16"}
    assert peaks["tflops"]["fp32"] <= peaks["tflops"]["tf32"]
    # Dense tensor rates: bf16 is twice tf32 on every chip here, to the digits that vendors print.
    assert peaks["tflops"]["bf16"] == pytest.approx(2 * peaks["tflops"]["tf32"], rel=0.02)
    assert 0.1 < peaks["memory_tb_per_s"] < 10
    assert "datasheet" in peaks["source"] or "whitepaper" in peaks["source"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "results").mkdir()
    for name in ("tracked.txt", "results/point.json"):
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "dirty"),
    [(None, False), ("tracked.txt", True), ("untracked.txt", False), ("results/point.json", False)],
)
def test_only_edits_of_tracked_code_are_dirty(
    repository: Path, edited: str | None, dirty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLAB_COMMIT", "a" * 40)  # counts only without a repository
    if edited:
        (repository / edited).write_text("two\n")
    assert commit(repository) == {"id": git(repository, "rev-parse", "HEAD"), "dirty": dirty}


def test_code_whose_edits_git_cannot_list_is_not_called_clean(repository: Path) -> None:
    (repository / ".git" / "index").write_text("damaged")
    assert commit(repository) == {"id": git(repository, "rev-parse", "HEAD"), "dirty": None}


@pytest.mark.parametrize("git_installed", [True, False])
def test_without_a_repository_or_git_a_given_commit_is_unverified_and_not_clean(
    git_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if not git_installed:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    assert commit(tmp_path) == {"id": None, "dirty": None}
    monkeypatch.setenv("LMLAB_COMMIT", "a" * 40)
    assert commit(tmp_path) == {"id": "a" * 40, "dirty": None, "unverified": True}
    monkeypatch.setenv("LMLAB_COMMIT", "main")
    with pytest.raises(ValueError, match=r"^LMLAB_COMMIT = 'main'; allowed"):
        commit(tmp_path)


def test_versions_are_text_or_null() -> None:
    found = versions()
    assert set(found) == {"python", "torch", "triton", "cuda", "cudnn", "driver", "lmlab"}
    assert (found["torch"], found["lmlab"]) == (torch.__version__, lmlab.__version__)
    assert all(value is None or type(value) is str for value in found.values())


CPU = torch.device("cpu")
PLAN = Plan(matmul_sides={}, copy_bytes=2**20, time_cap_s=1.0, min_time_s=0.01)
Times = Callable[..., Iterator[float]]


@pytest.fixture
def times_ms(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Replaces measuring by given median times; returns those that were not used."""

    def use(*milliseconds: float) -> Iterator[float]:
        left = iter(milliseconds)
        monkeypatch.setattr(ceilings, "_median_ms", lambda *_: next(left))
        return left

    return use


def test_a_copy_counts_both_directions(times_ms: Times) -> None:
    times_ms(4.0)
    record = copy_ceiling(CPU, PLAN)
    assert record["labels"] == {"bytes": 2 * 2**20}
    assert record["value"] == pytest.approx(2 * 2**20 / 4e-3 / 1e9)


@pytest.mark.parametrize(
    ("milliseconds", "best", "unused"),
    [((1.0, 2.0, 40.0), 1, []), ((400.0, 1.0), 0, [1.0])],
    ids=["the fastest shape wins", "a shape that would take too long is not started"],
)
def test_the_best_of_some_shapes_with_two_operations_per_multiply_add(
    milliseconds: tuple[float, ...], best: int, unused: list[float], times_ms: Times
) -> None:
    left = times_ms(*milliseconds)  # each shape is eight times the work of the one before
    sides = (8, 16, 32)
    record = matmul_ceiling("bf16", sides, CPU, PLAN)
    assert record["labels"] == {"dtype": "bf16", "side": sides[best]}
    assert record["value"] == pytest.approx(2 * sides[best] ** 3 / milliseconds[best] / 1e9)
    assert list(left) == unused


def test_failures_have_a_reason(times_ms: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = matmul_ceiling("tf32", (128,), CPU, PLAN)
    assert unsupported["status"] == "unsupported"
    assert unsupported["reason"].startswith("tf32 exists on NVIDIA GPUs")
    copy = copy_ceiling(CPU, replace(PLAN, copy_bytes=2**52))
    assert (copy["status"], copy["reason"]) == ("failed", "out of memory")
    times_ms(1.0)
    assert matmul_ceiling("fp32", (64, 2**25), CPU, PLAN)["labels"]["side"] == 64

    missing = RuntimeError('"addmm_impl_cpu_" not implemented for this type\nat line 7')
    monkeypatch.setattr(ceilings, "_median_ms", Mock(side_effect=missing))
    reason = matmul_ceiling("bf16", (64,), CPU, PLAN)["reason"]
    assert reason == '"addmm_impl_cpu_" not implemented for this type'


@pytest.mark.gpu
def test_a_gpus_tensor_cores_are_faster_than_its_fp32_units() -> None:
    rates = {
        name: matmul_ceiling(name, (4096,), torch.device("cuda", 0), ceilings.GPU_PLAN)["value"]
        for name in ("fp32", "tf32", "bf16")
    }
    assert rates["fp32"] < rates["tf32"] < rates["bf16"]
