"""When weights are gathered and freed and gradients scattered: FSDP's hooks into a step.

    forward of a block     its weights gathered, the next block's gather started; freed after
    backward of a block    gathered again, the block before it started; freed when its gradients
                           are there, which leave at once to be scattered

A block is what shares messages, in which a layer by itself is a block of one. The hooks are on the
block and on its layers alike: whichever is called first has the weights fetched, and they stay
until the outermost is done.

The gather of the next block is started before this one's is waited for, and so runs while this one
computes: with gloo a wait holds up the host, and with it all that it would start later. The last
block of a forward is the first of backward, and keeps its weights in between.

Backward is met through hooks on tensors, not on modules: a hook on a block's output runs just
before the block's backward, and the hook after a weight's accumulation runs when every use of it
has been differentiated. When the last gradient of a block comes, all leave together. Some never
come: those of frozen weights, and of layers that a step does not use. Others come late: an
embedding tied to the head waits for the first layer's backward. So when the gradient of a block's
input is there, what has come leaves without the rest, and the weights are freed.

A forward that runs during backward is a recomputation by gradient checkpointing. Its layers are
differentiated next, so their weights stay.

Ranks must use the same layers in the same order: gathers are collective, so a layer that only one
rank runs would wait for the others for ever.
"""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.parallel.fsdp_bundle import Bundle
from lmlab.parallel.fsdp_order import LayerOrder
from lmlab.parallel.hooks import differentiable_tensors, in_backward, map_tensors, weakly

REDUCTIONS_UNDER_WAY = 1
"""Blocks whose whole gradients may wait for their scatter while those of another are computed."""


class Traffic:
    """The bundles of one model and what is under way between them and the other ranks."""

    def __init__(self, bundles: list[Bundle], prefetch: int) -> None:
        self.bundles = bundles
        self._order = LayerOrder(prefetch)
        self._reducing: deque[Bundle] = deque()
        for number, bundle in enumerate(bundles):
            self._attach(number, bundle)

    def _attach(self, number: int, bundle: Bundle) -> None:
        """Follow a bundle through every module that computes with it."""
        for module in bundle.modules:
            module.register_forward_pre_hook(weakly(self._before_forward, number))
            module.register_forward_hook(
                weakly(self._after_forward, number), with_kwargs=True, always_call=True
            )
        if bundle.trainable:
            for unit in bundle.units:
                unit.full.register_post_accumulate_grad_hook(weakly(self._gradient_arrived, number))

    def begin_forward(self) -> None:
        """Forget what an earlier forward fetched and did not use: its weights may have changed."""
        if not in_backward():
            self._order.begin_forward()
            self.release_idle()

    def finish(self) -> None:
        """Send what has not been sent, wait for all gradients, free what is left over."""
        for bundle in self.bundles:
            if bundle.with_gradient:
                self._reduce(bundle)
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        self.release_idle()

    def release_idle(self) -> None:
        """Free all weights that no layer is computing with."""
        for bundle in self.bundles:
            if not bundle.users:
                bundle.release()

    def _before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        bundle = self.bundles[number]
        is_outermost = not bundle.users
        bundle.users.add(module)
        if is_outermost:
            look_ahead = self._order.recomputed if in_backward() else self._order.entered
            self._gather(bundle, look_ahead(number))

    def _after_forward(
        self, number: int, module: nn.Module, inputs: Any, keywords: Any, output: Any
    ) -> Any:
        bundle = self.bundles[number]
        bundle.users.discard(module)
        output = map_tensors(partial(bundle.apart, module), output)
        given = differentiable_tensors(output)
        for tensor in given:
            # A hook on a view is lost when the view is modified in place; one on its base is not.
            # What a reentrant checkpoint gives out may be a view of a base without gradient.
            base = tensor._base
            hooked = tensor if base is None or not base.requires_grad else base
            hooked.register_hook(weakly(self._before_backward, number))
        if not bundle.users:
            self._part(number, differentiable_tensors([*inputs, keywords]), bool(given))
        return output

    def _part(self, number: int, inputs: list[Tensor], comes_back: bool) -> None:
        """The outermost module that computes with a bundle is done with it."""
        bundle = self.bundles[number]
        if not bundle.trainable or bundle.tied or len(bundle.units) > 1:
            self._follow_back(number, inputs)
        if in_backward():
            return
        if comes_back and self._order.is_last(number):
            bundle.stand_aside()
        else:
            bundle.release()

    def _follow_back(self, number: int, inputs: list[Tensor]) -> None:
        """Have it known when the gradient of an input is there."""
        for tensor in inputs:
            if not tensor.is_leaf:
                tensor.register_hook(weakly(self._after_backward, number))
            elif in_backward():  # made for this recomputation; others last, and would keep hooks
                tensor.register_hook(weakly(self._soon_after_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._gather(self.bundles[number], self._order.came_back(number))

    def _after_backward(self, number: int, gradient: Tensor) -> None:
        bundle = self.bundles[number]
        if bundle.with_gradient:
            self._send_gradients(bundle)
        elif bundle.tied or not bundle.trainable:
            bundle.release()
        # Else all gradients have left, or they are still to come, from an earlier use of the block.

    def _soon_after_backward(self, number: int, gradient: Tensor) -> None:
        # A leaf's gradient may come before those of weights that are ready at the same time. No
        # backward goes on below a leaf, so nothing is lost by waiting for its end.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._after_backward, number, gradient))

    def _gradient_arrived(self, number: int, parameter: nn.Parameter) -> None:
        bundle = self.bundles[number]
        if len(bundle.with_gradient) == len(bundle.units):
            self._send_gradients(bundle)

    def _send_gradients(self, bundle: Bundle) -> None:
        bundle.release()
        self._reduce(bundle)

    def _reduce(self, bundle: Bundle) -> None:
        bundle.start_reduce()
        self._reducing.append(bundle)
        if len(self._reducing) > REDUCTIONS_UNDER_WAY:
            self._reducing.popleft().finish_reduce()

    def _gather(self, bundle: Bundle, ahead: list[int]) -> None:
        """Have wholes in place; gathers of those ahead start first, so that they run meanwhile."""
        bundle.start_gather()
        for number in ahead:
            self.bundles[number].start_gather()
        if not bundle.in_place:
            bundle.finish_gather()
