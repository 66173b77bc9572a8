"""When weights are gathered and freed and gradients scattered: FSDP's hooks into a step.

    forward of a layer     its weight gathered, the next ones' gathers started; freed after
    backward of a layer    gathered again, the ones before it started; freed when its gradient is
                           there, which leaves at once to be scattered

Backward is met through hooks on tensors, not on modules: a hook on a layer's output runs just
before the layer's backward, and the hook after the weight's accumulation runs when every use of it
has been differentiated. The latter never comes for a frozen weight, and late for one with several
homes (an embedding tied to the head waits for the first layer's backward), so those are freed when
the gradient of their layer's input is there.

A forward that runs during backward is a recomputation by gradient checkpointing. Its layers are
differentiated next, so their weights stay.

Ranks must use the same layers in the same order: gathers are collective, so a layer that only one
rank runs would wait for the others for ever.
"""

from collections import deque
from typing import Any

from torch import Tensor, nn

from lmlab.parallel.fsdp_order import LayerOrder
from lmlab.parallel.fsdp_unit import Unit
from lmlab.parallel.hooks import differentiable_tensors, in_backward, map_tensors, weakly

REDUCTIONS_UNDER_WAY = 2
"""Whole gradients that may wait for their scatter at a time; each takes memory while it does."""


class Traffic:
    """The units of one model and what is under way between them and the other ranks."""

    def __init__(self, units: list[Unit], prefetch: int) -> None:
        self.units = units
        self._order = LayerOrder(prefetch)
        self._reducing: deque[Unit] = deque()
        for number, unit in enumerate(units):
            self._attach(number, unit)

    def _attach(self, number: int, unit: Unit) -> None:
        """Follow a unit through every layer that computes with it."""
        for module in {module for module, _ in unit.homes}:
            module.register_forward_pre_hook(weakly(self._before_forward, number))
            module.register_forward_hook(weakly(self._after_forward, number), always_call=True)
        if unit.full.requires_grad:
            unit.full.register_post_accumulate_grad_hook(weakly(self._gradient_arrived, number))

    def begin_forward(self) -> None:
        """Forget what an earlier forward fetched and did not use: its weights may have changed."""
        if not in_backward():
            self._order.begin_forward()
            self.release_idle()

    def finish(self) -> None:
        """Wait for all gradients; free what is left over."""
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        self.release_idle()

    def release_idle(self) -> None:
        """Free every weight that no layer is computing with."""
        for unit in self.units:
            if unit.users == 0:
                unit.release()

    def _before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        unit = self.units[number]
        unit.users += 1
        look_ahead = self._order.recomputed if in_backward() else self._order.entered
        self._gather(unit, look_ahead(number))

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        unit = self.units[number]
        unit.users -= 1
        output = map_tensors(unit.apart, output)
        for tensor in differentiable_tensors(output):
            # A hook on a view is lost when the view is modified in place; one on its base is not.
            base = tensor if tensor._base is None else tensor._base
            base.register_hook(weakly(self._before_backward, number))
        if not unit.full.requires_grad or len(unit.homes) > 1:
            for tensor in differentiable_tensors(inputs):
                tensor.register_hook(weakly(self._after_backward, number))
        if unit.users == 0 and not in_backward():
            unit.release()
        return output

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._gather(self.units[number], self._order.came_back(number))

    def _after_backward(self, number: int, gradient: Tensor) -> None:
        self.units[number].release()

    def _gradient_arrived(self, number: int, parameter: nn.Parameter) -> None:
        unit = self.units[number]
        unit.release()
        unit.start_reduce()
        self._reducing.append(unit)
        if len(self._reducing) > REDUCTIONS_UNDER_WAY:
            self._reducing.popleft().finish_reduce()

    def _gather(self, unit: Unit, ahead: list[int]) -> None:
        """Have a unit whole; gathers of those ahead start first, so that they run meanwhile."""
        unit.start_gather()
        for number in ahead:
            self.units[number].start_gather()
        unit.finish_gather()
