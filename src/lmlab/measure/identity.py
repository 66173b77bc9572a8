"""The machine's id, a short name under which all its results are stored.

It must be the same in every process (the workflow while it is parsed, each job, the report), must
not change with a driver or library update, and must be cheap, because every parse of the workflow
computes it. It is made from the GPU's marketing name as the driver reports it, `NVIDIA H200` ->
`nvidia-h200`, or without a GPU from the CPU's, `cpu-amd-epyc-7763`. Two machines with the same
GPU (or CPU) model share an id on purpose: their results are meant to be comparable.

GPUs are found through NVML, without torch or CUDA. A GPU that the installed PyTorch cannot use (a
build without CUDA) would make every job fail, so PyTorch's version file is checked too, as text.
"""

import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmlab.measure.nvml import nvml_session, visible_gpus

CPUINFO = Path("/proc/cpuinfo")

# What vendors add to the model name.
_NOISE = re.compile(
    r"\((?:R|TM|C)\)|@.*$|\bCPU\b|\b\d+-Core\b|\bProcessor\b|\bwith Radeon.*$", re.IGNORECASE
)

# Arm cores are identified by number: (implementer, part) as in Arm's MIDR_EL1 register.
_ARM_CORES = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}


@dataclass(frozen=True)
class Machine:
    """The machine as recorded in results."""

    id: str
    device: Literal["cuda", "cpu"]
    name: str
    gpu_count: int  # visible GPUs of the same kind as the first


def find_machine() -> Machine:
    """Identify this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with nvml_session() as nvml:
        names = [gpu.name for gpu in visible_gpus(nvml, visible)] if nvml else []
    if names and torch_built_for_cuda():
        return Machine(slug(names[0]), "cuda", names[0], names.count(names[0]))
    name = cpu_name()
    return Machine(f"cpu-{slug(_NOISE.sub(' ', name))}", "cpu", name, 0)


def slug(name: str) -> str:
    """Lower case, words joined by dashes: `NVIDIA H100 80GB HBM3` -> `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """The CPU: cpuinfo's model name, an Arm core looked up by number, or the architecture."""
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    fields = dict(re.findall(r"^([^\t:\n]+?)\s*:[ \t]*(.*)$", cpuinfo, re.MULTILINE))
    if fields.get("model name", "").strip():
        return str(fields["model name"]).strip()
    part = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    return _ARM_CORES.get(part) or platform.machine() or "unknown"


def torch_built_for_cuda() -> bool:
    """Whether the installed PyTorch is a CUDA build, from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    return re.search(r"^cuda\b[^=\n]*= *['\"]", version_file.read_text(), re.MULTILINE) is not None
