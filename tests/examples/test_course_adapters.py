"""The course's adapters: every name of both editions, with the numbers of the plain computation."""

import importlib
from copy import deepcopy
from types import ModuleType

import pytest
import torch
from torch import nn

from lmlab.attention import FlashAttention, FlashAttentionTiled
from lmlab.study.files import ROOT


@pytest.fixture(scope="module")
def adapters() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "course")
        return importlib.import_module("adapters")


def test_attention_is_ours(adapters: ModuleType) -> None:
    assert adapters.get_flashattention_autograd_function_pytorch() is FlashAttentionTiled
    assert adapters.get_flashattention_autograd_function_triton() is FlashAttention


WRAPPERS = {
    "get_ddp": "ddp_on_after_backward",
    "get_ddp_individual_parameters": "ddp_individual_parameters_on_after_backward",
    "get_ddp_bucketed": "ddp_bucketed_on_after_backward",
    "get_fsdp": "fsdp_on_after_backward",
}


@pytest.mark.usefixtures("one_rank")
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
