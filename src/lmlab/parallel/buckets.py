"""Gradients of several parameters in one flat buffer, averaged in one all-reduce.

Each parameter's `.grad` is a view into the buffer, so the message needs no packing and gradients
are in memory once. Autograd accumulates into an existing view in place. After
`zero_grad(set_to_none=True)` it creates a new tensor; a hook copies that into the buffer at once
and restores the view.

A parameter without a gradient here may have one on another rank, and then counts as zeros. If no
rank has one, `.grad` must stay None, because an optimizer would decay a parameter whose gradient is
zero. So the buffer ends in one flag per parameter, whose mean is zero only if no rank has a
gradient. Reading flags synchronizes the host with the GPU, so only ranks without a gradient do it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmlab.parallel.checks import check_dense
from lmlab.parallel.collectives import Group, Pending, start_mean_all_reduce


class Bucket:
    """The gradients of parameters of one dtype on one device."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.parameters = list(parameters)
        self._group = group
        sizes = [parameter.numel() for parameter in self.parameters]
        self.buffer = torch.zeros(
            sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device
        )
        *slices, self._has_gradient = self.buffer.split([*sizes, len(sizes)])
        self._views: dict[nn.Parameter, Tensor] = {
            parameter: piece.view(parameter.shape)
            for parameter, piece in zip(self.parameters, slices, strict=True)
        }
        self._pending: Pending | None = None
        self._missing: list[int] = []

    @torch.no_grad()
    def adopt(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has created into the buffer."""
        view = self._views[parameter]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        check_dense(gradient)
        view.copy_(gradient)
        parameter.grad = view

    @torch.no_grad()
    def start(self) -> None:
        """Start averaging; gradients must not be touched until `wait`."""
        self.wait()
        for parameter in self.parameters:
            self.adopt(parameter)
        self._missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self._has_gradient.fill_(1.0)
        for index in self._missing:
            self._has_gradient[index] = 0.0
            self._views[self.parameters[index]].zero_()
        self._pending = start_mean_all_reduce(self.buffer, self._group)

    @torch.no_grad()
    def wait(self) -> None:
        """Finish averaging, if it was started: every gradient is then the mean over ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        if not self._missing:
            return
        anywhere = self._has_gradient.tolist()
        for index in self._missing:
            if anywhere[index] != 0.0:
                parameter = self.parameters[index]
                parameter.grad = self._views[parameter]
