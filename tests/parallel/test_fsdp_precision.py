"""With a compute dtype, weights are sent and multiplied in it; masters and norms stay in fp32."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel import FSDP
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.recording import recorded_messages
from tests.parallel.training import assert_near, backward, batch_of, own_part, parameters, sgd

both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@both_dtypes
@on_ranks(2)
def test_what_is_sent_and_computed_has_the_dtype_and_what_persists_is_fp32(
    dtype: torch.dtype,
) -> None:
    wrapped = FSDP(build("layers"), dtype)
    inside: dict[str, Any] = {}

    def recorder(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            own = [p.dtype for p in layer.parameters(recurse=False)]
            inside[name] = (args[0].dtype, own, output.dtype)

        return hook

    for name in ("inner", "norm", "head"):
        # Runs before FSDP's own hooks, while the layer holds its full weight.
        getattr(wrapped.module, name).register_forward_hook(recorder(name), prepend=True)
    with recorded_messages() as log:
        backward(wrapped, own_part(batch_of(0)))
    assert inside["inner"] == inside["head"] == (dtype, [dtype, dtype], dtype)
    assert inside["norm"] == (torch.float32, [torch.float32] * 2, torch.float32)
    assert {(message.kind, message.dtype) for message in log} == {
        ("all-gather", dtype),
        ("reduce-scatter", dtype),
        ("all-reduce", torch.float32),
    }
    optimizer = torch.optim.AdamW(wrapped.parameters())
    optimizer.step()
    persistent = [
        *wrapped.parameters(),
        *(p.grad for p in wrapped.parameters()),
        *(state["exp_avg"] for state in optimizer.state.values()),
        *wrapped.gather_full_parameters().values(),
    ]
    assert {tensor.dtype for tensor in persistent} == {torch.float32}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


@both_dtypes
@on_ranks(3)
def test_training_follows_fp32_within_the_precision(dtype: torch.dtype) -> None:
    for blocks in (lambda model: [model], lambda model: []):
        wrapped, alone = FSDP(mlp(), dtype, blocks=blocks), mlp()
        optimizers = [sgd(wrapped.parameters()), sgd(alone.parameters())]
        for _ in range(10):
            x = torch.randn(4 * dist.get_world_size(), 7)
            for model, batch, optimizer in zip(
                (wrapped, alone), (own_part(x), x), optimizers, strict=True
            ):
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
        expected = parameters(alone)
        assert_near(wrapped.gather_full_parameters(), expected, torch.finfo(dtype).eps)


@on_ranks(2)
def test_layers_with_a_replicated_matrix_compute_in_fp32() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    wrapped = FSDP(nn.Sequential(layer, nn.Linear(6, 3)), torch.bfloat16)
    output = wrapped(torch.randn(2, 4, 6))
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    wrapped.finish_gradient_synchronization()
    assert all(torch.isfinite(p.grad).all() for p in wrapped.parameters())
