"""One model's weights and optimizer state, on which every rung runs its training step.

Two copies of a large model do not fit, so all rungs share the fp32 weights and both moments, and a
bf16 copy of the weights once a rung needs it. A rung's gradients and graph are freed with it.

The learning rate is zero: the work is the same but the weights never change, so every rung can be
checked against the same loss and gradients. Larger batches repeat the first, which changes neither.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.chapters.attention.measure.variants import free_memory
from lmlab.chapters.fastest_step.measure.rungs import Rung
from lmlab.kernels.adamw import FusedAdamW
from lmlab.kernels.fused_loss import fused_linear_cross_entropy
from lmlab.measure.precision import precision_named, tf32_allowed
from lmlab.model.adamw import AdamW
from lmlab.model.checkpointing import checkpointed, parse_strategy
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM

WARMUPS_BEFORE_CAPTURE = 2
SAMPLED = 2**16
"""Elements of each gradient that are compared."""


def run_block(block: nn.Module, x: Tensor) -> Any:
    """One block; what torch.compile sees."""
    return block.forward(x)


@cache
def compiled_block(shape: ModelShape, *rung: object) -> Callable[..., Tensor]:
    """The compiled block for one shape and the rung settings that its code depends on. Each has its
    own copy of the function, since a second shape would be a recompilation."""
    own = FunctionType(run_block.__code__.replace(), run_block.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=False)


class Trainer:
    """Weights, moments and tokens that rungs share."""

    def __init__(
        self, shape: ModelShape, asked: Mapping[str, Any], device: torch.device, *,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.device, self._rope_theta = shape, device, asked["rope_theta"]
        seed = asked["seed"]
        torch.manual_seed(seed)
        built = self._build(torch.bfloat16 if narrow else torch.float32)
        weights = list(built.parameters())
        self.masters = [w.detach().float() for w in weights] if narrow else weights
        self._models = {narrow: built}
        self._moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.masters]
        generator = torch.Generator().manual_seed(seed)
        size = (shape.batch, shape.context + 1)
        self._tokens = torch.randint(shape.vocab_size, size, generator=generator).to(device)

    def model(self, rung: Rung) -> TransformerLM:
        """The model in the rung's types; the bf16 copy is made when first asked for."""
        if rung.narrow not in self._models:
            assert rung.narrow, "a trainer that began in bf16 has no fp32 model"
            self._models[True] = self._build(torch.bfloat16)
            with torch.no_grad():
                for low, high in zip(self._models[True].parameters(), self.masters, strict=True):
                    low.copy_(high)
        return self._models[rung.narrow]

    def batch(self, copies: int) -> tuple[Tensor, Tensor]:
        """Random tokens and their successors, the batch repeated `copies` times."""
        tokens = self._tokens.repeat(copies, 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def optimizer(self, rung: Rung) -> torch.optim.Optimizer:
        """An optimizer over the rung's parameters and the shared state."""
        parameters = list(self.model(rung).parameters())
        kind = FusedAdamW if rung.fused_adamw else AdamW
        optimizer: torch.optim.Optimizer = kind(parameters, lr=0.0)
        for parameter, master, moments in zip(parameters, self.masters, self._moments, strict=True):
            state = {"step": 1, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            optimizer.state[parameter] = state | ({"master": master} if rung.narrow else {})
        return optimizer

    def shared_bytes(self, rung: Rung) -> int:
        """Bytes of the shared tensors that the rung uses and that are already allocated."""
        tensors = [*self.masters, *(m for pair in self._moments for m in pair)]
        if rung.narrow and True in self._models:
            tensors += self._models[True].parameters()
        return sum(tensor.nbytes for tensor in tensors)

    def drop_gradients(self) -> None:
        """Free the gradients of every model."""
        for model in self._models.values():
            model.zero_grad(set_to_none=True)

    def _build(self, dtype: torch.dtype) -> TransformerLM:
        at = self.shape
        sizes = at.vocab_size, at.context, at.d_model, at.num_layers, at.num_heads, at.d_ff
        return TransformerLM(*sizes, self._rope_theta, device=self.device, dtype=dtype)


class RungStep:
    """The training step of one rung; `close` frees its graph and gradients."""

    def __init__(self, trainer: Trainer, rung: Rung) -> None:
        self.rung, self._trainer = rung, trainer
        self._model = trainer.model(rung)
        self._optimizer = trainer.optimizer(rung)
        self._tokens, self._targets = trainer.batch(rung.copies)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor | None] = []
        self.loss = torch.zeros(())

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self._tokens.numel()

    def run(self) -> None:
        """One training step."""
        with self.selected():
            self._forward_backward()
            self._optimizer.step()

    def gradients(self) -> list[Tensor]:
        """A sample of every parameter's gradient after forward and backward, in fp32."""
        with self.selected():
            self._forward_backward()
        found = []
        for parameter in self._model.parameters():
            assert parameter.grad is not None, "every parameter takes part"
            flat = parameter.grad.flatten()
            found.append(flat[:: max(1, flat.numel() // SAMPLED)].float())
        return found

    def capture(self) -> None:
        """Capture forward and backward as a CUDA graph, if the rung uses one and has not captured
        it yet; the fused optimizer is already a single launch."""
        if not self.rung.graph or self._graph is not None:
            return
        with self.selected():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUPS_BEFORE_CAPTURE):
                    self._compute()
            torch.cuda.current_stream().wait_stream(stream)
            self._trainer.drop_gradients()
            free_memory(self._trainer.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._compute()
            self._graph = graph
            self._gradients = [parameter.grad for parameter in self._model.parameters()]

    def close(self) -> None:
        """Free the graph and the gradients."""
        self._graph, self._gradients = None, []
        self._trainer.drop_gradients()
        free_memory(self._trainer.device)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Run the block with the model set up for this rung."""
        rung, model = self.rung, self._model
        attention = registry.load(rung.attention)
        blocks: list[Any] = list(model.layers)
        shape = replace(self._trainer.shape, num_layers=1)  # blocks share one compilation
        kind = shape, rung.attention, rung.copies, rung.narrow, rung.precision
        for block in blocks:
            block.attn.attention = attention
            if rung.compiled:
                block._compiled_call_impl = partial(compiled_block(*kind), block)
        strategy = parse_strategy(rung.checkpoint)
        segmented = nullcontext() if strategy.kind == "none" else checkpointed(model, strategy)
        try:
            with tf32_allowed(precision_named(rung.precision).tf32), segmented:
                yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None

    def _forward_backward(self) -> None:
        if self._graph is None:
            self._compute()
            return
        for parameter, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        self._graph.replay()

    def _compute(self) -> None:
        self._trainer.drop_gradients()
        rung, device = self.rung, self._trainer.device
        autocast = precision_named(rung.precision).autocast and not rung.narrow
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            x = self._model.token_embeddings(self._tokens)
            for layer in self._model.layers:
                x = layer(x)
            hidden, head = self._model.ln_final(x), self._model.lm_head
            if rung.fused_loss:
                loss = fused_linear_cross_entropy(hidden, head.weight, self._targets)
            else:
                loss = cross_entropy(head(hidden), self._targets)
        loss.backward()
        self.loss = loss.detach()
