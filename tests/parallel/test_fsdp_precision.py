"""With a compute type, weights travel and multiply in it; masters and norms stay in fp32."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp_blocks import members_of_lists
from tests.parallel.launcher import RankPool
from tests.parallel.models import all_together, build
from tests.parallel.recording import recorded_messages
from tests.parallel.test_fsdp import torch_fsdp
from tests.parallel.training import (
    assert_near,
    backward,
    batch_of,
    loss_of,
    own_part,
    parameters,
    quietly,
    sgd,
)

both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def look_inside(model: str, dtype: torch.dtype) -> None:
    ours = FSDP(build(model, seed=0), dtype)
    inside: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            own = [p.dtype for p in layer.parameters(recurse=False)]
            inside[name] = (inputs[0].dtype, own, output.dtype)

        return hook

    for name in ("inner", "norm", "head"):
        # Before ours: it must see the layer while it computes.
        getattr(ours.module, name).register_forward_hook(note(name), prepend=True)
    output = ours(own_part(batch_of(0, 0)))
    assert inside["inner"] == inside["head"] == (dtype, [dtype, dtype], dtype)
    assert inside["norm"] == (torch.float32, [torch.float32] * 2, torch.float32)
    assert output.dtype == torch.float32  # the buffer at the end of this model is

    loss_of(output).backward()
    ours.finish_gradient_synchronization()
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}
    assert {p.dtype for p in ours.gather_full_parameters().values()} == {torch.float32}
    optimizer = torch.optim.AdamW(ours.parameters())
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}


@both_types
def test_layers_compute_in_it_and_all_that_lasts_is_fp32(
    ranks: RankPool, dtype: torch.dtype
) -> None:
    ranks.run(look_inside, 2, model="torch's layers", dtype=dtype)


def dtypes_sent(model: str, dtype: torch.dtype) -> set[tuple[str, torch.dtype]]:
    ours = FSDP(build(model, seed=0), dtype)
    with recorded_messages() as log:
        backward(ours, own_part(batch_of(0, 0)))
    return {(message.kind, message.dtype) for message in log}


@pytest.mark.parametrize("model", ["torch's layers", "blocks"])
@both_types
def test_weights_and_their_gradients_travel_in_it(
    ranks: RankPool, model: str, dtype: torch.dtype
) -> None:
    assert ranks.run(dtypes_sent, 2, model=model, dtype=dtype)[0] == {
        ("all-gather", dtype),
        ("reduce-scatter", dtype),
        ("all-reduce", torch.float32),
    }


def mlp(seed: int) -> nn.Sequential:
    """Linear layers alone, so that torch's and ours cast the same."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def train_beside_torch(dtype: torch.dtype, seed: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    blocks = all_together if seed % 2 else members_of_lists  # the latter: each alone, in this model
    ours = FSDP(mlp(seed), dtype, blocks=blocks)
    theirs = torch_fsdp(mlp(seed), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    alone = mlp(seed)
    contestants: list[nn.Module] = [ours, theirs, alone]
    optimizers = [sgd(contestant.parameters()) for contestant in contestants]
    for step in range(10):
        x = torch.randn(4 * dist.get_world_size(), 7, generator=torch.Generator().manual_seed(step))
        for contestant, optimizer in zip(contestants, optimizers, strict=True):
            optimizer.zero_grad()
            quietly(backward, contestant, x if contestant is alone else own_part(x))
            optimizer.step()
    whole = ours.gather_full_parameters()
    # Both round in the compute type, in different places; fp32 is as near as that allows.
    precision = torch.finfo(dtype).eps
    full = {name: p.full_tensor().detach() for name, p in theirs.named_parameters()}
    assert_near(whole, full, precision)
    assert_near(whole, parameters(alone), precision)


@pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")
@both_types
def test_ten_steps_follow_torch_and_fp32_as_far_as_the_type_allows(
    ranks: RankPool, dtype: torch.dtype, world_size: int
) -> None:
    for seed in range(3):
        ranks.run(train_beside_torch, world_size, dtype=dtype, seed=seed)


def transformer_in_bf16() -> tuple[float, float]:
    ours = FSDP(build("transformer", seed=0), torch.bfloat16)
    optimizer = sgd(ours.parameters())
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        logits = ours(own_part(batch_of(0, 0)))
        assert logits.dtype == torch.bfloat16
        loss = loss_of(logits.float())
        loss.backward()
        ours.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def torchs_layer_in_bf16() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    ours = FSDP(nn.Sequential(layer, nn.Linear(6, 3)), torch.bfloat16)
    output = ours(torch.randn(2, 4, 6))
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    ours.finish_gradient_synchronization()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


def test_layers_that_hold_a_replicated_matrix_keep_to_fp32(ranks: RankPool) -> None:
    ranks.run(torchs_layer_in_bf16, 2)


def test_the_model_of_the_study_learns_in_bf16(ranks: RankPool) -> None:
    for first, last in ranks.run(transformer_in_bf16, 2):
        assert last < 0.9 * first
