"""The course's adapters: every name of both editions, with the numbers of the plain computation."""

import importlib
from collections.abc import Iterator
from copy import deepcopy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmlab.attention import naive
from lmlab.study.files import ROOT


@pytest.fixture(scope="module")
def adapters() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "course")
        return importlib.import_module("adapters")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["pytorch", "triton"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_attention_saves_the_log_sum_exp(adapters: ModuleType, kind: str, is_causal: bool) -> None:
    function = getattr(adapters, f"get_flashattention_autograd_function_{kind}")()
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randn(2, 32, 16, generator=generator) for _ in range(4))
    q, k, v, grad_o = (x.requires_grad_() for x in draws)
    output = function.apply(q, k, v, is_causal)
    expected = naive.attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert [x.shape for x in output.grad_fn.saved_tensors].count((2, 32)) == 1
    inputs = (q, k, v)
    found = torch.autograd.grad(output, inputs, grad_o)
    for ours, theirs in zip(found, torch.autograd.grad(expected, inputs, grad_o), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


WRAPPERS = {
    "get_ddp": "ddp_on_after_backward",
    "get_ddp_individual_parameters": "ddp_individual_parameters_on_after_backward",
    "get_ddp_bucketed": "ddp_bucketed_on_after_backward",
    "get_fsdp": "fsdp_on_after_backward",
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_takes_the_plain_steps(adapters: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    bucket_mb = [1.0] if "bucketed" in name else []
    wrapped = getattr(adapters, name)(deepcopy(plain), *bucket_mb)
    x = torch.randn(3, 4)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer = adapters.get_sharded_optimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        reference.zero_grad()
        plain(x).sum().backward()
        reference.step()
        adapters.ddp_bucketed_on_train_batch_start(wrapped, optimizer)
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        getattr(adapters, WRAPPERS[name])(wrapped, optimizer)
        optimizer.step()
    full = adapters.fsdp_gather_full_params(wrapped) if name == "get_fsdp" else wrapped.state_dict()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(full[key], expected)
