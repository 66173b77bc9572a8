"""What a kernel does, by its name: an ordered table of rules, of which the first match decides.

Names are all that a trace has, and they say a lot: cuBLAS and CUTLASS encode the instruction.
`s16816gemm` multiplies 16 x 8 x 16 tiles on tensor cores and accumulates in single precision, while
`sgemm` is a loop of fused multiply-adds on the SIMT cores. A matrix product whose name says neither
is a plain `matmul`, and so is every product on a CPU.

A name does not say what a kernel is *for*. An optimizer written in plain PyTorch runs the same
elementwise kernels as the model, so inside the optimizer's range they count as `optimizer`. A
softmax written out as max, subtract, exp, sum, divide stays reduction and elementwise; that it is a
softmax is known from its range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

FAMILIES = (
    *("matmul_tensor_core", "matmul_simt", "matmul", "softmax", "elementwise"),
    *("reduction", "copy", "communication", "optimizer", "other"),
)
MATMULS = ("matmul_tensor_core", "matmul_simt", "matmul")


class Rule(NamedTuple):
    """Names that contain `pattern` belong to `family`; `why` gives the reason."""

    family: str
    pattern: str
    why: str


_ELEMENTWISE_OPERATORS = (
    r"add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|exp2|log|log1p|neg|abs|sign|reciprocal|sin|cos|tanh"
    r"|sigmoid|silu|gelu|relu|threshold|where|masked_fill_|lerp|addcmul|addcdiv|clamp\w*|fill|zero_"
    r"|maximum|minimum|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|triu|tril|arange|bernoulli|normal"
    r"|uniform|random|dropout|native_dropout|remainder|floor|round|isnan|isinf"
)
_REDUCTION_OPERATORS = (
    r"sum|mean|amax|amin|max|min|argmax|argmin|prod|any|all|var|std|var_mean|norm"
    r"|linalg_vector_norm|logsumexp|cumsum|native_layer_norm|_fused_rms_norm|nll_loss_forward"
    r"|nll_loss|embedding_dense|scatter_add|index_add|_index_put_impl"
)
_COPY_OPERATORS = r"copy_|cat|flip|roll|index|index_select|gather|scatter_?|repeat_interleave"

RULES = (
    Rule("copy", r"^\[?(CUDA )?(memcpy|memset)\b", "the copy engines, not a kernel"),
    Rule("communication", r"^(void )?nccl|\b(c10d|gloo|nccl):", "named after the library"),
    Rule(
        "communication",
        r"multimem_|(one|two)_shot_all_reduce|symm_mem|nvshmem",
        "collectives implemented as a kernel over peer memory",
    ),
    Rule(
        "optimizer",
        r"fused_?adam|adamw?_(math|kernel)|_fused_(adamw?|sgd|adagrad)_",
        "the whole update in one kernel",
    ),
    Rule(
        "optimizer",
        r"multi_tensor_apply",
        "foreach kernels; little else uses them",
    ),
    Rule(
        "matmul_tensor_core",
        r"flash_(fwd|bwd|forward|backward)|flash_attn|fmha|sdpa|mha_[fb]wd|flashinfer",
        "fused attention: most of its time is in its two products",
    ),
    Rule(
        "softmax",
        r"^(?!aten::).*soft_?max",
        "forward or backward, alone or fused by Inductor with its neighbours",
    ),
    Rule("reduction", r"splitK_?reduce", "sums the parts of a split-K product"),
    Rule("matmul_simt", r"ffma|_simt_|simt_[sdchz]gemm", "named after scalar multiply-adds"),
    Rule(
        "matmul_tensor_core",
        r"[a-z]\d{3,6}(gemm|cudnn|fprop|dgrad|wgrad)",
        "digits: tile of the tensor core instruction (s16816gemm)",
    ),
    Rule(
        "matmul_tensor_core",
        r"tensorop|tensor\d+x\d+x\d+|hmma|imma|qmma|gmma|wmma|tcgen05|utcmma",
        "names the tensor core instruction or its CUTLASS class",
    ),
    Rule("matmul_tensor_core", r"nvjet", "cuBLAS from Hopper on, always on tensor cores"),
    Rule(
        "matmul_tensor_core",
        r"gemm.*(tf32|bf16|fp16|f16|e4m3|e5m2|i8i8)|(tf32|bf16|fp16|e4m3)\w*gemm",
        "operand type that only tensor cores multiply fast",
    ),
    Rule("matmul_simt", r"(_|^| )[sdcz]gemm", "single or double precision loop"),
    Rule(
        "matmul_simt",
        r"gemv|gemmSN_|gemmk1|dot_kernel",
        "products with a vector: memory-bound, no tensor cores",
    ),
    Rule("matmul", r"gemm|cutlass|triton_(tem|mm)|\bmatmul_kernel", "does not say which cores"),
    Rule("reduction", r"triton_(red|per)_", "Inductor's kernels with a loop over the reduced axis"),
    Rule("elementwise", r"triton_(poi|for)_", "Inductor's pointwise kernels"),
    Rule(
        "copy",
        r"copy_kernel|CatArray|batched_copy|vectorized_gather|indexSelect|index_select|flip_kernel",
        "moves data, possibly converting its type",
    ),
    Rule(
        "reduction",
        r"reduce_kernel|DeviceReduce|reduce_1Block|ReduceAdd|nll_loss|layer_?norm|^delta_kernel",
        "many inputs, few outputs",
    ),
    Rule("reduction", r"rms_?norm|RowwiseMoments|GammaBeta|batch_norm", "normalization statistics"),
    Rule(
        "reduction",
        r"indexing_backward|embedding_backward\w*_kernel|compute_grad_weight|scatter_add_kernel",
        "gradient of a lookup: sums rows with the same index",
    ),
    Rule("elementwise", r"elementwise|triu_tril|fused_dropout|distribution_", "one output each"),
    Rule("softmax", r"^aten::_(log_)?softmax(_backward_data)?$", "the CPU operator that computes"),
    Rule(
        "matmul",
        r"^(aten|mkl|mkldnn)::_?(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|outer|addr"
        r"|mkl_linear|mkldnn_linear|linear_pointwise|int_mm|scaled_mm)_?$",
        "CPU product",
    ),
    Rule("matmul", r"^aten::_scaled_dot_product_\w+_for_cpu", "fused CPU attention"),
    Rule("copy", rf"^aten::({_COPY_OPERATORS})$", "CPU operator"),
    Rule("reduction", rf"^aten::({_REDUCTION_OPERATORS})(_backward)?_?$", "CPU operator"),
    Rule("elementwise", rf"^aten::({_ELEMENTWISE_OPERATORS})(_backward)?_?$", "CPU operator"),
    Rule("elementwise", r"^aten::_foreach_", "CPU operator over a list of tensors"),
)

_COMPILED = [(rule, re.compile(rule.pattern, re.IGNORECASE)) for rule in RULES]
_OPTIMIZER_RANGE = re.compile(r"optimizer([ _.]step\b.*)?", re.IGNORECASE)


def rule_of(name: str) -> Rule | None:
    """The first rule that matches a kernel's or operator's name; None if none does."""
    return next((rule for rule, pattern in _COMPILED if pattern.search(name)), None)


def family(name: str) -> str:
    """Family of a kernel or operator by its name alone."""
    rule = rule_of(name)
    return rule.family if rule else "other"


def is_optimizer(ranges: Iterable[str]) -> bool:
    """Whether one of these ranges is the optimizer step; clearing gradients is not."""
    return any(_OPTIMIZER_RANGE.fullmatch(name) for name in ranges)


def family_in_optimizer(plain: str) -> str:
    """Family of a kernel inside the optimizer: only products and collectives keep theirs."""
    return plain if plain in (*MATMULS, "communication") else "optimizer"
