"""Casts at the boundaries of layers when FSDP computes in a lower precision.

A sharded layer receives its weight in the compute dtype. Its inputs and replicated parameters (a
bias) are cast to that dtype while it runs, differentiably, so that the gradient of an fp32 bias is
fp32. Layers that are not sharded, mostly norms, compute in their own dtype, which is better
numerically, and return the compute dtype. Saved activations are thus in the compute dtype.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lmlab.parallel.hooks import weak_hook


def cast(nested: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, wherever they are nested."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, nested)


class LayerCast:
    """Casts a layer's inputs and the named parameters while it runs, and then its outputs."""

    def __init__(
        self,
        layer: nn.Module,
        dtype: torch.dtype,
        parameter_names: Iterable[str] = (),
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self._output_dtype = output_dtype
        self._parameters = {name: layer._parameters[name] for name in parameter_names}
        layer.register_forward_pre_hook(weak_hook(self._before), with_kwargs=True)
        layer.register_forward_hook(weak_hook(self._after), always_call=True)

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for name, parameter in self._parameters.items():
            layer._parameters[name] = cast(parameter, self._dtype)
        return cast(args, self._dtype), cast(kwargs, self._dtype)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        layer._parameters.update(self._parameters)
        return output if self._output_dtype is None else cast(output, self._output_dtype)


def cast_layers(
    module: nn.Module, sharded: set[nn.Parameter], compute_dtype: torch.dtype
) -> list[LayerCast]:
    """Attach casts to every layer with parameters; they are active while the list is alive."""
    casts = []
    for layer in module.modules():
        own = {n: p for n, p in layer.named_parameters(recurse=False) if p.is_floating_point()}
        replicated = [name for name, parameter in own.items() if parameter not in sharded]
        if len(replicated) < len(own):
            casts.append(LayerCast(layer, compute_dtype, replicated))
        elif own:
            dtype = next(iter(own.values())).dtype
            casts.append(LayerCast(layer, dtype, output_dtype=compute_dtype))
    return casts
