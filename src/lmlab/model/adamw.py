"""AdamW: Adam with weight decay applied to the weights instead of the gradient.

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w (1 - lr decay) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

A step has no matmul, so on a GPU it is bound by memory bandwidth for large parameters and by launch
overhead for small ones. It is a plain loop over parameters, so that every kernel is visible in a
profile. The bias corrections are scalars, folded into the step size and eps, which leaves seven
kernels and one temporary per parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class AdamW(Optimizer):
    """Matches `torch.optim.AdamW`; parameter groups can override every setting."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        correction1 = 1.0 - beta1 ** state["step"]
        correction2 = math.sqrt(1.0 - beta2 ** state["step"])
        first: Tensor = state["exp_avg"]
        second: Tensor = state["exp_avg_sq"]

        first.lerp_(gradient, 1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        denominator = second.sqrt().add_(group["eps"] * correction2)
        step_size = group["lr"] * correction2 / correction1
        parameter.addcdiv_(first, denominator, value=-step_size)


def _check_settings(settings: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0.0:
            raise ValueError(f"{name} must be a number of at least 0, got {settings[name]!r}")
    if not all(0.0 <= beta < 1.0 for beta in settings["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), got {settings['betas']!r}")
