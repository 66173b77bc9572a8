"""Gradients of several parameters side by side in one buffer, averaged in one message.

A parameter's `.grad` is a view into the buffer, so the message is ready without packing and no
second copy of the gradients exists. Autograd keeps to the view as long as there is one: it adds to
a gradient in place. After `zero_grad(set_to_none=True)` there is none, and autograd puts a fresh
tensor in its place; a hook right after moves that one into the buffer and hangs the view back, so
that at most one parameter's gradient exists twice, for as long as a copy takes.

A parameter that got no gradient on this rank may have got one elsewhere. Its slice then counts as
zeros, as if this rank's part of the batch had nothing to say on it. When no rank has one, its
gradient stays None, for an optimizer would decay and move a parameter whose gradient is zero. To
know which it is, a buffer ends in one number a parameter, 1 where there is a gradient: averaged
with the rest, it is zero only if nobody had one. It is read only on a rank that lacks a gradient,
because reading stops the host until the GPU is there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmlab.parallel.collectives import Group, Pending, start_mean_all_reduce
from lmlab.parallel.hooks import check_dense


class Bucket:
    """The gradients of parameters of one type on one device."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.parameters = list(parameters)
        self._group = group
        sizes = [parameter.numel() for parameter in self.parameters]
        self.buffer = torch.zeros(
            sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device
        )
        *slices, self._presence = self.buffer.split([*sizes, len(sizes)])
        self._views: dict[nn.Parameter, Tensor] = {
            parameter: piece.view(parameter.shape)
            for parameter, piece in zip(self.parameters, slices, strict=True)
        }
        self._pending: Pending | None = None
        self._absent: list[int] = []

    @torch.no_grad()
    def adopt(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has just made into the buffer."""
        view = self._views[parameter]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        check_dense(gradient)
        view.copy_(gradient)
        parameter.grad = view

    @torch.no_grad()
    def start(self) -> None:
        """Send the gradients off to be averaged; they may not be touched until `wait`."""
        self.wait()
        for parameter in self.parameters:
            self.adopt(parameter)
        self._absent = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self._presence.fill_(1.0)
        for index in self._absent:
            self._presence[index] = 0.0
            self._views[self.parameters[index]].zero_()
        self._pending = start_mean_all_reduce(self.buffer, self._group)

    @torch.no_grad()
    def wait(self) -> None:
        """Until no averaging is under way: then every gradient here is the mean over ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        if not self._absent:
            return
        present = self._presence.tolist()
        for index in self._absent:
            if present[index] != 0.0:
                parameter = self.parameters[index]
                parameter.grad = self._views[parameter]
