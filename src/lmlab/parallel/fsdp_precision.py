"""Layers of different precision in one model: what is cast where.

With a compute type, a sharded layer's weight arrives in that type. Its inputs must be of that type
too, and so must what else it holds (a bias is replicated and stays in fp32): both are cast on the
way in, differentiably, so that the gradient of an fp32 bias is fp32. What it gives out is in the
compute type, and so are the activations that are kept for backward.

Layers that are not sharded, norms mostly, hold few weights, in fp32, and sum over features. They
compute in their own type and hand on the compute type: numerically the careful choice, and on a GPU
a layer norm whose inputs and weights differ in type is an error.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmlab.parallel.hooks import map_tensors, weakly


def cast(nested: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in arguments or results, in another type."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(convert, nested)


class ComputesIn:
    """A sharded layer: inputs, and parameters that are not sharded, cast for the time it runs."""

    def __init__(self, module: nn.Module, replicated: list[str], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._replicated = {name: module._parameters[name] for name in replicated}
        module.register_forward_pre_hook(weakly(self._before), with_kwargs=True)
        module.register_forward_hook(weakly(self._after), always_call=True)

    def _before(self, module: nn.Module, inputs: Any, keywords: Any) -> tuple[Any, Any]:
        for name, parameter in self._replicated.items():
            module._parameters[name] = cast(parameter, self._dtype)
        return cast(inputs, self._dtype), cast(keywords, self._dtype)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(self._replicated)


class KeepsItsPrecision:
    """A replicated layer: inputs cast to its own type, results to the compute type."""

    def __init__(self, module: nn.Module, own: torch.dtype, compute: torch.dtype) -> None:
        self._own = own
        self._compute = compute
        module.register_forward_pre_hook(weakly(self._before), with_kwargs=True)
        module.register_forward_hook(weakly(self._after))

    def _before(self, module: nn.Module, inputs: Any, keywords: Any) -> tuple[Any, Any]:
        return cast(inputs, self._own), cast(keywords, self._own)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return cast(output, self._compute)


def follow(
    module: nn.Module, sharded: set[nn.Parameter], compute: torch.dtype
) -> list[ComputesIn | KeepsItsPrecision]:
    """Have every layer cast what it is given; the casts last as long as the list is kept."""
    casts: list[ComputesIn | KeepsItsPrecision] = []
    for layer in module.modules():
        own = {n: p for n, p in layer.named_parameters(recurse=False) if p.is_floating_point()}
        replicated = [name for name, parameter in own.items() if parameter not in sharded]
        if len(replicated) < len(own):
            casts.append(ComputesIn(layer, replicated, compute))
        elif own:
            casts.append(KeepsItsPrecision(layer, next(iter(own.values())).dtype, compute))
    return casts
