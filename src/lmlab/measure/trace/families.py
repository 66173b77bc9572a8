"""What a kernel does, told from its name by an ordered table of rules; the first that fits decides.

Names are all that a trace has. They say a lot: cuBLAS and CUTLASS write the instruction into them.
`s16816gemm` multiplies 16 x 8 x 16 tiles with tensor cores and adds up in single precision, while
`sgemm` is the plain loop of fused multiply-adds on the SIMT cores. Where a product's name says
neither, it is a `matmul` and no more; so is every product on a CPU, which has no such cores.

A name does not say what a kernel is *for*. An optimizer written in plain PyTorch runs the same
elementwise kernels as the model, so within a range of the optimizer they count as `optimizer`.
Softmax written out as max, subtract, exp, sum, divide stays reduction and elementwise: that it is a
softmax is said by the range that it stands in.
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
    """Names in which `pattern` is found belong to `family`, because of `why`."""

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
    Rule("communication", r"^(void )?nccl|\b(c10d|gloo|nccl):", "collectives by their library"),
    Rule(
        "communication",
        r"multimem_|(one|two)_shot_all_reduce|symm_mem|nvshmem",
        "collectives that a kernel does by itself over peer memory",
    ),
    Rule(
        "optimizer",
        r"fused_?adam|adamw?_(math|kernel)|_fused_(adamw?|sgd|adagrad)_",
        "all of a step",
    ),
    Rule(
        "optimizer",
        r"multi_tensor_apply",
        "foreach kernels update whole lists of parameters; little else uses them",
    ),
    Rule(
        "matmul_tensor_core",
        r"flash_(fwd|bwd|forward|backward)|flash_attn|fmha|sdpa|mha_[fb]wd|flashinfer",
        "fused attention: as far as a name tells, its time is that of its two products",
    ),
    Rule(
        "softmax",
        r"^(?!aten::).*soft_?max",
        "forward or backward, alone or fused by Inductor with its neighbours",
    ),
    Rule("reduction", r"splitK_?reduce", "adds up the parts of a product cut along its sum"),
    Rule("matmul_simt", r"ffma|_simt_|simt_[sdchz]gemm", "says that it uses multiply-adds"),
    Rule(
        "matmul_tensor_core",
        r"[a-z]\d{3,6}(gemm|cudnn|fprop|dgrad|wgrad)",
        "the digits are the tile of one tensor core instruction (s16816gemm, h884gemm)",
    ),
    Rule(
        "matmul_tensor_core",
        r"tensorop|tensor\d+x\d+x\d+|hmma|imma|qmma|gmma|wmma|tcgen05|utcmma",
        "names the tensor core instruction or CUTLASS's class of it",
    ),
    Rule("matmul_tensor_core", r"nvjet", "cuBLAS's kernels from Hopper on, all on tensor cores"),
    Rule(
        "matmul_tensor_core",
        r"gemm.*(tf32|bf16|fp16|f16|e4m3|e5m2|i8i8)|(tf32|bf16|fp16|e4m3)\w*gemm",
        "a library product of a type that only tensor cores multiply fast",
    ),
    Rule("matmul_simt", r"(_|^| )[sdcz]gemm", "single or double precision loop"),
    Rule(
        "matmul_simt",
        r"gemv|gemmSN_|gemmk1|dot_kernel",
        "products with a vector or a sliver: bound by memory, done without tensor cores",
    ),
    Rule("matmul", r"gemm|cutlass|triton_(tem|mm)|\bmatmul_kernel", "does not say on which cores"),
    Rule("reduction", r"triton_(red|per)_", "Inductor's kernels with a loop over the reduced axis"),
    Rule("elementwise", r"triton_(poi|for)_", "Inductor's pointwise kernels"),
    Rule(
        "copy",
        r"copy_kernel|CatArray|batched_copy|vectorized_gather|indexSelect|index_select|flip_kernel",
        "moves numbers without computing any, a change of type included",
    ),
    Rule(
        "reduction",
        r"reduce_kernel|DeviceReduce|reduce_1Block|ReduceAdd|nll_loss|layer_?norm|^delta_kernel",
        "adds many numbers up into few",
    ),
    Rule("reduction", r"rms_?norm|RowwiseMoments|GammaBeta|batch_norm", "normalisation: two means"),
    Rule(
        "reduction",
        r"indexing_backward|embedding_backward\w*_kernel|compute_grad_weight|scatter_add_kernel",
        "gradient of a lookup: adds the rows of equal index",
    ),
    Rule("elementwise", r"elementwise|triu_tril|fused_dropout|distribution_", "one number each"),
    Rule("softmax", r"^aten::_(log_)?softmax(_backward_data)?$", "CPU operator that does the work"),
    Rule(
        "matmul",
        r"^(aten|mkl|mkldnn)::_?(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|outer|addr"
        r"|mkl_linear|mkldnn_linear|linear_pointwise|int_mm|scaled_mm)_?$",
        "CPU product",
    ),
    Rule("matmul", r"^aten::_scaled_dot_product_\w+_for_cpu", "CPU attention in one operator"),
    Rule("copy", rf"^aten::({_COPY_OPERATORS})$", "CPU operator"),
    Rule("reduction", rf"^aten::({_REDUCTION_OPERATORS})(_backward)?_?$", "CPU operator"),
    Rule("elementwise", rf"^aten::({_ELEMENTWISE_OPERATORS})(_backward)?_?$", "CPU operator"),
    Rule("elementwise", r"^aten::_foreach_", "CPU operator over a list of tensors"),
)

_COMPILED = [(rule, re.compile(rule.pattern, re.IGNORECASE)) for rule in RULES]
_OPTIMIZER_RANGE = re.compile(r"optimizer([ _.]step\b.*)?", re.IGNORECASE)


def rule_of(name: str) -> Rule | None:
    """The first rule that fits a kernel's or operator's name, None where none does."""
    return next((rule for rule, pattern in _COMPILED if pattern.search(name)), None)


def family(name: str) -> str:
    """Family of a kernel or operator by its name alone."""
    rule = rule_of(name)
    return rule.family if rule else "other"


def is_optimizer(ranges: Iterable[str]) -> bool:
    """Whether one of these ranges is the optimizer's; clearing gradients is not."""
    return any(_OPTIMIZER_RANGE.fullmatch(name) for name in ranges)


def family_in_optimizer(plain: str) -> str:
    """Family of a kernel within the optimizer: products and collectives stay what they are."""
    return plain if plain in (*MATMULS, "communication") else "optimizer"
