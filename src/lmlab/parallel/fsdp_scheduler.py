"""When FSDP gathers and frees weights and reduces gradients, driven by hooks in a training step.

    forward of a group     gathered, and the next group's gather started; freed afterwards
    backward of a group    gathered again, and the previous group's gather started; freed when its
                           gradients are ready, and their reduce-scatter started

A block and its layers all have hooks: whichever is called first triggers the gather, and the
weights stay until the outermost module is done.

The next gather is started before waiting for the current one, because with gloo waiting blocks the
host. Gathering one group ahead keeps the link busy; more would take memory. The last group of
forward is the first of backward and stays gathered in between.

A hook on a module's output runs just before the module's backward; the post-accumulate hook of a
weight runs when all its uses have been differentiated. When the last gradient of a group is ready,
all are sent together. Some gradients never come (frozen weights, unused layers), others come late
(an embedding tied to the head), so once the gradient of the group's input is ready, the gradients
available are sent and the weights are freed.

A forward that runs during backward is a recomputation by activation checkpointing. Its layers are
differentiated next, so their weights stay. It runs forward from a known position up to the layer
that backward has reached.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lmlab.parallel.fsdp_group import FSDPGroup
from lmlab.parallel.hooks import differentiable_tensors, in_backward, weak_hook


class ExecutionOrder:
    """Groups in order of use, by index, in the current and the previous forward.

    A step almost always runs layers in the order of the previous step, so the order of one forward
    predicts the next, and in reverse it predicts backward. A wrong prediction costs an unneeded
    gather, never a wrong result. Where a forward deviates from the prediction, none is made.
    """

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._position = 0

    def begin_forward(self) -> None:
        """Make the order of the previous forward the expected one."""
        self._expected, self._seen = self._seen or self._expected, []
        self._position = 0

    def forward(self, group: int) -> list[int]:
        """Record a use in forward; return the group expected next, if any."""
        here = len(self._seen)
        self._seen.append(group)
        self._position = len(self._seen)
        if self._expected[here : here + 1] != [group]:
            return []
        return self._expected[here + 1 : here + 2]

    def is_last(self, group: int) -> bool:
        """Whether this use is expected to be the last of forward, where backward begins."""
        return self._seen[-1:] == [group] and self._seen == self._expected

    def backward(self, group: int) -> list[int]:
        """Record that backward has reached a group; return the group expected next, if any.

        A group with several outputs is reached once per output.
        """
        here = self._last_use(group, before=self._position + 1)
        if here is None:
            # A second backward through the same forward, or backward through an earlier one.
            here = self._last_use(group, before=len(self._seen))
        if here is None:
            return []
        self._position = here
        return self._seen[max(here - 1, 0) : here]

    def recomputed(self, group: int) -> list[int]:
        """The group expected after one that is recomputed in backward, if any."""
        here = self._last_use(group, before=self._position + 1)
        return [] if here is None else self._seen[here + 1 : self._position + 1][:1]

    def _last_use(self, group: int, before: int) -> int | None:
        uses = [i for i, used in enumerate(self._seen[:before]) if used == group]
        return uses[-1] if uses else None


class Scheduler:
    """The groups of one model and the messages in flight."""

    def __init__(self, groups: list[FSDPGroup]) -> None:
        self.groups = groups
        self._order = ExecutionOrder()
        self._reducing: FSDPGroup | None = None
        """The group whose full gradients wait for their reduction while the next are computed."""
        for index, group in enumerate(groups):
            for module in group.modules:
                module.register_forward_pre_hook(weak_hook(self._before_forward, index))
                module.register_forward_hook(
                    weak_hook(self._after_forward, index), with_kwargs=True, always_call=True
                )
            for param in group.params if group.trainable else ():
                param.full.register_post_accumulate_grad_hook(
                    weak_hook(self._gradient_ready, index)
                )

    def begin_forward(self) -> None:
        """Free weights still gathered from an earlier forward: they may be stale."""
        if not in_backward():
            self._order.begin_forward()
            self.free_idle()

    def finish(self) -> None:
        """Send remaining gradients, wait for all of them, free remaining weights."""
        for group in self.groups:
            if group.with_gradient:
                self._reduce(group)
        for group in self.groups:
            group.finish_reduce()
        self._reducing = None
        self.free_idle()

    def free_idle(self) -> None:
        for group in self.groups:
            if not group.running:
                group.free()

    def _before_forward(self, index: int, module: nn.Module, args: Any) -> None:
        group = self.groups[index]
        is_outermost = not group.running
        group.running.add(module)
        if is_outermost:
            predict = self._order.recomputed if in_backward() else self._order.forward
            self._gather(group, predict(index))

    def _after_forward(
        self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        group = self.groups[index]
        group.running.discard(module)
        output = tree_map_only(Tensor, partial(group.copy_if_view, module), output)
        outputs = differentiable_tensors(output)
        for tensor in outputs:
            # A hook on a view is lost when the view is modified in place; one on its base is not.
            # The output of a reentrant checkpoint may be a view of a base without gradient.
            base = tensor._base
            hooked = tensor if base is None or not base.requires_grad else base
            hooked.register_hook(weak_hook(self._before_backward, index))
        if not group.running:
            self._leave_forward(index, differentiable_tensors([args, kwargs]), bool(outputs))
        return output

    def _leave_forward(self, index: int, inputs: list[Tensor], has_backward: bool) -> None:
        """Called when the outermost module that uses a group is done."""
        group = self.groups[index]
        if not group.trainable or group.tied or len(group.params) > 1:
            for tensor in inputs:  # to know when their gradients are ready
                if not tensor.is_leaf:
                    tensor.register_hook(weak_hook(self._after_backward, index))
                elif in_backward():  # a leaf of this recomputation; others would keep the hook
                    tensor.register_hook(weak_hook(self._at_end_of_backward, index))
        if in_backward():
            return
        if has_backward and self._order.is_last(index):
            group.install_shards()
        else:
            group.free()

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        self._gather(self.groups[index], self._order.backward(index))

    def _after_backward(self, index: int, gradient: Tensor) -> None:
        group = self.groups[index]
        if group.with_gradient:
            self._reduce(group)
        elif group.tied or not group.trainable:
            group.free()
        # Otherwise all have been sent, or they come later, from an earlier use of the block.

    def _at_end_of_backward(self, index: int, gradient: Tensor) -> None:
        # A leaf's gradient may be ready before the weights' gradients. Backward does not continue
        # past a leaf, so waiting for the end of backward costs nothing.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._after_backward, index, gradient))

    def _gradient_ready(self, index: int, parameter: nn.Parameter) -> None:
        group = self.groups[index]
        if len(group.with_gradient) == len(group.params):
            self._reduce(group)

    def _reduce(self, group: FSDPGroup) -> None:
        """Free the weights and start reducing their gradients; finishes the previous reduction."""
        group.free()
        group.start_reduce()
        if self._reducing not in (None, group):
            self._reducing.finish_reduce()
        self._reducing = group

    def _gather(self, group: FSDPGroup, ahead: list[int]) -> None:
        """Install the full weights, after starting the gather of the group ahead."""
        group.start_gather()
        for index in ahead:
            self.groups[index].start_gather()
        if not group.installed:
            group.finish_gather()
