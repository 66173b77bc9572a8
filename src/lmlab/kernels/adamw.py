"""AdamW in one kernel launch per parameter group and dtype.

An AdamW step has no data reuse: it reads weight, gradient and two moments and writes three of them
back, 28 bytes per fp32 parameter, so memory bandwidth bounds it. A loop over parameters in plain
PyTorch operations moves each tensor several times and launches seven kernels per parameter. Here
each program updates one block of one tensor entirely in registers. Programs look up their tensors
in a table of addresses, so one launch covers parameters of all shapes.

16-bit parameters get an fp32 master copy in the optimizer's state: the update happens there, and
the rounded result is written to the parameter in the same pass. That saves a separate cast of every
weight before the forward and of every gradient after the backward.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lmlab.kernels.interpreted import kernel_for

BLOCK = 4096
COLUMNS = 5
"""Addresses per parameter: fp32 weights, gradient, both moments, 16-bit weights."""


@triton.jit
def update_block(
    weights, gradients, firsts, seconds, rounded, offsets, size,
    beta1, rest1, beta2, rest2, decay, step_size, eps,
    HAS_MASTER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update one block; only a tensor's last block is masked, because masks prevent wide loads."""
    mask = offsets < size if MASKED else None
    gradient = tl.load(gradients + offsets, mask=mask).to(tl.float32)
    weight = tl.load(weights + offsets, mask=mask)
    first = tl.load(firsts + offsets, mask=mask)
    second = tl.load(seconds + offsets, mask=mask)
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    weight = weight * decay - step_size * first / (tl.sqrt(second) + eps)
    tl.store(firsts + offsets, first, mask=mask)
    tl.store(seconds + offsets, second, mask=mask)
    tl.store(weights + offsets, weight, mask=mask)
    if HAS_MASTER:
        tl.store(rounded + offsets, weight.to(rounded.dtype.element_ty), mask=mask)


@triton.jit
def adamw_kernel(
    table, sizes, tensor_of_block, block_in_tensor,
    beta1, rest1, beta2, rest2, decay, step_size, eps,
    PARAMETER: tl.constexpr, HAS_MASTER: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block: find the tensors, then update the block."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_block + program)
    start = tl.load(block_in_tensor + program).to(tl.int64) * BLOCK
    size = tl.load(sizes + tensor)
    row = table + tensor * COLUMNS
    # Addresses are multiples of 16 (checked on the host), so four numbers are loaded at a time.
    weights = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    gradients = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(PARAMETER)), 16)
    firsts = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    seconds = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    rounded = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(PARAMETER)), 16)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        update_block(
            weights, gradients, firsts, seconds, rounded, offsets, size,
            beta1, rest1, beta2, rest2, decay, step_size, eps, HAS_MASTER, False,
        )  # fmt: skip
    else:
        update_block(
            weights, gradients, firsts, seconds, rounded, offsets, size,
            beta1, rest1, beta2, rest2, decay, step_size, eps, HAS_MASTER, True,
        )  # fmt: skip


TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class FusedAdamW(Optimizer):
    """Matches `torch.optim.AdamW` on fp32 parameters; 16-bit ones get fp32 master weights."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, defaults)
        self._blocks: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, with one launch per group and dtype; returns
        the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] += 1
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for dtype in dict.fromkeys(parameter.dtype for parameter in used):
                self._update([each for each in used if each.dtype == dtype], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it is; the base class casts it to the parameters' type."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        dtype, device = parameters[0].dtype, parameters[0].device
        addresses = [address for each in parameters for address in self._addresses(each)]
        sizes, tensors, blocks = self._blocks_of(parameters)
        beta1, beta2 = group["betas"]
        correction = math.sqrt(1 - beta2 ** group["step"])
        kernel_for(adamw_kernel, device)[(len(blocks),)](
            self._table(addresses, device), sizes, tensors, blocks,
            beta1, 1 - beta1, beta2, 1 - beta2, 1 - group["lr"] * group["weight_decay"],
            group["lr"] * correction / (1 - beta1 ** group["step"]), group["eps"] * correction,
            PARAMETER=TRITON_TYPES[dtype], HAS_MASTER=dtype != torch.float32,
            COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip

    def _addresses(self, parameter: Tensor) -> tuple[int, ...]:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "parameters without a gradient are left out"
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float()
        if gradient.dtype != parameter.dtype or not gradient.is_contiguous():
            parameter.grad = gradient = gradient.to(parameter.dtype).contiguous()
        master = state.get("master", parameter)
        tensors = (master, gradient, state["exp_avg"], state["exp_avg_sq"], parameter)
        found = tuple(tensor.data_ptr() for tensor in tensors)
        if any(address % 16 for address in found) or not parameter.is_contiguous():
            raise ValueError("FusedAdamW: parameters must be contiguous and aligned to 16 bytes")
        return found

    def _table(self, addresses: list[int], device: torch.device) -> Tensor:
        """The address table on the device, cached: it repeats once the allocator settles."""
        key = tuple(addresses)
        if key not in self._tables:
            self._tables.clear()
            table = torch.tensor(addresses, dtype=torch.int64)
            if device.type == "cuda":  # a copy from pageable memory would wait for backward
                table = table.pin_memory().to(device, non_blocking=True)
            self._tables[key] = table
        return self._tables[key]

    def _blocks_of(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Tensor sizes; for each block, the index of its tensor and its index in that tensor."""
        sizes = tuple(parameter.numel() for parameter in parameters)
        if sizes not in self._blocks:
            counts = torch.tensor([-(-size // BLOCK) for size in sizes])
            tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
            starts = counts.cumsum(0) - counts
            blocks = torch.arange(len(tensors)) - starts[tensors]
            device = parameters[0].device
            indices = tensors.to(device, torch.int32), blocks.to(device, torch.int32)
            self._blocks[sizes] = torch.tensor(sizes, device=device), *indices
        return self._blocks[sizes]
