"""Helpers shared by the memory topics: cost-model inputs, the allocator, known tensors."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.chapters.attention.measure.variants import free_memory
from lmlab.jobs.workload import OWN_ATTENTION, Step, Workload
from lmlab.measure.clock import synchronize
from lmlab.measure.device import reset_peak_memory
from lmlab.measure.memory.observer import address_of
from lmlab.measure.memory.recorder import KnownTensor
from lmlab.measure.records import Record, by_label, value, values
from lmlab.model.activations import FP32
from lmlab.model.peak import Stage
from lmlab.model.shape import ModelShape

GIB = 2**30


def for_cost_model(workload: Workload, device: torch.device) -> dict[str, Any] | None:
    """Keyword arguments for the cost model; None for a model or attention it does not cover."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return None
    return {"shape": workload.shape, "precision": workload.precision.name, "device": device.type}


def stream_bytes(shape: ModelShape) -> int:
    """One fp32 tensor of the residual stream: batch x context x d_model."""
    return FP32 * shape.tokens * shape.d_model


def empty_allocator(device: torch.device) -> None:
    """Free all unused memory and reset the peak."""
    synchronize(device)
    free_memory(device)
    reset_peak_memory(device)


def known_tensors(model: nn.Module, step: Step) -> dict[int, KnownTensor]:
    """Live tensors by address: weights, buffers, gradients, optimizer state, batch."""
    return {
        address_of(tensor): KnownTensor(
            category=category, name=name, size=tensor.untyped_storage().nbytes()
        )
        for category, name, tensor in _named_tensors(model, step)
    }


def _named_tensors(model: nn.Module, step: Step) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("other", name, vars(step)[f"_{name}"]) for name in ("tokens", "targets"))
    yield from (("other", name, buffer) for name, buffer in model.named_buffers())
    state = step._optimizer.state
    for name, parameter in model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", parameter.grad
        for key, tensor in state.get(parameter, {}).items():
            if isinstance(tensor, Tensor):
                yield "optimizer_state", f"{key} of {name}", tensor


def predicted_records(moment: Stage | None, **labels: str | int) -> list[Record]:
    """The predicted peak with its phase and stage, and its parts."""
    if moment is None:
        return []
    where = {"phase": moment.phase, "stage": moment.name, **labels}
    return [
        value("predicted_peak", moment.parts.total, "B", **where),
        *by_label("predicted_live", "category", asdict(moment.parts), "B", **labels),
    ]


def environment_records() -> list[Record]:
    """Switches and threads that the measurement ran with."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return values({"tf32": tf32, "threads": torch.get_num_threads()})
