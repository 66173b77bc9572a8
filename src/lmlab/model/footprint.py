"""Predicted memory of one step by category, from the model's shape alone. No torch.

Weights, gradients and AdamW's two moments take 4, 4 and 8 bytes per parameter. Activations
(`activations`) live from forward to backward. The peak is computed in `peak`. Only tensors are
counted: allocator rounding and library workspaces (tens of MiB) come on top.
"""

from dataclasses import dataclass
from typing import get_args

from lmlab.model.activations import FP32, Device, Precision, saved_activations, widths_of
from lmlab.model.cost import Mode, check_choice, parameter_count
from lmlab.model.peak import input_bytes, predicted_peak, rope_table_bytes
from lmlab.model.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one step by category; `peak` is the most allocated at one time."""

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    optimizer_state: int
    activations: int  # saved by autograd from forward to backward, without 16-bit weight copies
    autocast_weights: int  # 16-bit copies of the weights that autocast makes once per step
    peak: int


def memory(
    shape: ModelShape, precision: Precision, mode: Mode, *, device: Device = "cuda"
) -> Footprint:
    """Bytes of one step of the model with naive attention, fp32 weights and AdamW."""
    check_choice("precision", precision, get_args(Precision))
    check_choice("mode", mode, get_args(Mode))
    check_choice("device", device, get_args(Device))
    count = parameter_count(shape)
    trains = mode != "forward"
    return Footprint(
        parameters=FP32 * count.total,
        buffers=rope_table_bytes(shape),
        inputs=input_bytes(shape, mode),
        gradients=FP32 * count.total if trains else 0,
        optimizer_state=2 * FP32 * count.total if mode == "train_step" else 0,
        activations=saved_activations(shape, precision, device=device) if trains else 0,
        autocast_weights=widths_of(precision, device).weight_copy * count.linear,
        peak=predicted_peak(shape, precision, mode, device=device).parts.total,
    )
