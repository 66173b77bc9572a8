"""Kernel names: what a kernel does, and a short name for tables.

The first matching rule in `RULES` decides the family. cuBLAS and CUTLASS names encode the
instruction: `s16816gemm` multiplies 16 x 8 x 16 tiles on tensor cores and accumulates in single
precision, while `sgemm` is a loop of fused multiply-adds on the SIMT cores. A matrix product whose
name shows neither is a plain `matmul`, and so is every product on a CPU.

A name does not tell what a kernel is *for*. An optimizer written in plain PyTorch runs the same
elementwise kernels as the model, so inside the optimizer's range they count as `optimizer`. And
only their range shows that a maximum, subtraction, exponential, sum and division form a softmax.

A demangled PyTorch name has hundreds of characters, because the operation is a lambda inside a
template argument. It becomes `vectorized_elementwise_kernel<exp>`: the base name, and the operation
if a rule finds one. Scheduling details are dropped from cuBLAS names. A name that is still too long
is cut in the middle, because the end often holds the distinguishing number. Different kernels may
share a short name; tables group by the full one.
"""

import re
from collections.abc import Iterable

MATMULS = ("matmul_tensor_core", "matmul_simt", "matmul")
OTHERS = ("softmax", "elementwise", "reduction", "copy", "communication", "optimizer", "other")
FAMILIES = (*MATMULS, *OTHERS)

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
_MATMUL_OPERATORS = (
    r"mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|outer|addr"
    r"|mkl_linear|mkldnn_linear|linear_pointwise|int_mm|scaled_mm"
)
_COPY_OPERATORS = r"copy_|cat|flip|roll|index|index_select|gather|scatter_?|repeat_interleave"

RULES = (
    ("copy", r"^\[?(CUDA )?(memcpy|memset)\b"),  # the copy engines, not a kernel
    ("communication", r"^(void )?nccl|\b(c10d|gloo|nccl):"),  # named after the library
    # Collectives implemented as a kernel over peer memory.
    ("communication", r"multimem_|(one|two)_shot_all_reduce|symm_mem|nvshmem"),
    # The whole update in one kernel.
    ("optimizer", r"fused_?adam|adamw?_(math|kernel)|_fused_(adamw?|sgd|adagrad)_"),
    ("optimizer", r"multi_tensor_apply"),  # foreach kernels; little else uses them
    # Fused attention: most of its time is in its two products.
    ("matmul_tensor_core", r"flash_([fb]wd|forward|backward|attn)|fmha|sdpa|mha_[fb]wd|flashinfer"),
    # Forward or backward, alone or fused by Inductor with its neighbours.
    ("softmax", r"^(?!aten::).*soft_?max"),
    ("reduction", r"splitK_?reduce"),  # sums the parts of a split-K product
    ("matmul_simt", r"ffma|_simt_|simt_[sdchz]gemm"),  # named after scalar multiply-adds
    # Digits: tile of the tensor core instruction (s16816gemm).
    ("matmul_tensor_core", r"[a-z]\d{3,6}(gemm|cudnn|fprop|dgrad|wgrad)"),
    # Names the tensor core instruction or its CUTLASS class.
    ("matmul_tensor_core", r"tensorop|tensor\d+x\d+x\d+|hmma|imma|qmma|gmma|wmma|tcgen05|utcmma"),
    ("matmul_tensor_core", r"nvjet"),  # cuBLAS from Hopper on, always on tensor cores
    # Operand type that only tensor cores multiply fast (f16 also matches bf16).
    ("matmul_tensor_core", r"gemm.*(tf32|f16|fp16|e4m3|e5m2|i8i8)|(tf32|bf16|fp16|e4m3)\w*gemm"),
    ("matmul_simt", r"(_|^| )[sdcz]gemm"),  # single or double precision loop
    # Products with a vector: memory-bound, no tensor cores.
    ("matmul_simt", r"gemv|gemmSN_|gemmk1|dot_kernel"),
    ("matmul", r"gemm|cutlass|triton_(tem|mm)|\bmatmul_kernel"),  # does not say which cores
    ("reduction", r"triton_(red|per)_"),  # Inductor's kernels with a loop over the reduced axis
    ("elementwise", r"triton_(poi|for)_"),  # Inductor's pointwise kernels
    # Moves data, possibly converting its type.
    ("copy", r"copy_kernel|CatArray|batched_copy|vectorized_gather|index_?select|flip_kernel"),
    # Many inputs, few outputs.
    ("reduction", r"reduce_kernel|DeviceReduce|reduce_1Block|ReduceAdd|nll_loss|^delta_kernel"),
    ("reduction", r"layer_?norm|rms_?norm|RowwiseMoments|GammaBeta|batch_norm"),  # normalization
    (  # gradient of a lookup: sums rows with the same index
        "reduction",
        r"indexing_backward|embedding_backward\w*_kernel|compute_grad_weight|scatter_add_kernel",
    ),
    ("elementwise", r"elementwise|triu_tril|fused_dropout|distribution_"),  # one output each
    # Operators on a CPU: they are named `aten::softmax` and the like.
    ("softmax", r"^aten::_(log_)?softmax(_backward_data)?$"),
    ("matmul", rf"^(aten|mkl|mkldnn)::_?({_MATMUL_OPERATORS})_?$"),
    ("matmul", r"^aten::_scaled_dot_product_\w+_for_cpu"),
    ("copy", rf"^aten::({_COPY_OPERATORS})$"),
    ("reduction", rf"^aten::({_REDUCTION_OPERATORS})(_backward)?_?$"),
    ("elementwise", rf"^aten::({_ELEMENTWISE_OPERATORS})(_backward)?_?$"),
    ("elementwise", r"^aten::_foreach_"),
)
_OPTIMIZER_RANGE = re.compile(r"optimizer([ _.]step\b.*)?", re.IGNORECASE)


def family(name: str) -> str:
    """Family of a kernel or operator by its name alone."""
    matches = (label for label, rule in RULES if re.search(rule, name, re.IGNORECASE))
    return next(matches, "other")


def is_optimizer(ranges: Iterable[str]) -> bool:
    """Whether one of these ranges is the optimizer step; clearing gradients is not."""
    return any(_OPTIMIZER_RANGE.fullmatch(name) for name in ranges)


MAX_LENGTH = 64
_TAIL_LENGTH = 8

# How to print the operation inside the template arguments; the first match is used.
_OPERATIONS = (
    (r"\b(cutlass_\w+)", r"\1"),
    (r"\b[AB]UnaryFunctor<.*?(\w+?)Functor\b(?!<.*Functor)", r"\1 scalar"),
    (r"\bBinaryFunctor<.*?binary_internal::(\w+?)Functor\b", r"\1"),
    (r"\bCUDAFunctorOnSelf_(\w+)", r"\1 scalar"),
    (r"\bCUDAFunctor_(\w+)", r"\1"),
    (r"\b(?!gpu_)(\w+?)_kernel_(?:cuda|impl)", r"\1"),
    (r"\b(\w+)Ops\b", r"\1"),
    (r"\b(sum|prod|xor_sum)_functor\b", r"\1"),
    (r"\b(\w+?)_cuda_out\b", r"\1"),
    (r"\bTensorAssign\b", "assign"),
    (r"\bReduceAdd\b", "add"),
    (r"\b(\w+)Functor\b", r"\1"),
    (r"\blaunch_(\w+)\(", r"\1"),
    (r"\b(\w+?)(?:_cuda)?_kernel[(<]", r"\1"),
)
_ONE_WORD = re.compile(r"[A-Z][a-z]+( scalar)?")

# Applied first: spelling variants, and details that do not distinguish two kernels of a table.
_SPELLINGS = (
    (r"^(Mem(?:cpy|set)(?: [A-Z]to[A-Z])?)\b.*", r"\1"),
    (r"<unnamed>|\(anonymous namespace\)", "unnamed"),
    (r"^std::enable_if<[^>]*>::type ", ""),
    (r"_stage\d+|_warp(group)?size\d+x\d+x\d+|_align[abc]\d+|_execute", ""),
    (r"(?:_kernel)?__5x_cublas$", ""),
    (r"_tilesize(?=\d)", "_tile"),
)
_TEMPLATE = re.compile(r"^(?:[\w ]+ )?(?P<path>[\w:]+)<(?P<arguments>.*)$", re.DOTALL)
_FUNCTION = re.compile(r"^(?:\w+ )?(?P<path>[\w:]+)\(.*$", re.DOTALL)


def shorten(name: str) -> str:
    """A kernel's name in at most MAX_LENGTH characters."""
    for spelling, plain in _SPELLINGS:
        name = re.sub(spelling, plain, name)
    short = _shortened(name)
    if len(short) <= MAX_LENGTH:
        return short
    return f"{short[: MAX_LENGTH - _TAIL_LENGTH - 1]}…{short[-_TAIL_LENGTH:]}"


def _shortened(name: str) -> str:
    if template := _TEMPLATE.match(name):
        operation = _operation(template["arguments"])
        if operation and operation.startswith("cutlass"):
            return operation
        base = _base(template["path"])
        return f"{base}<{operation}>" if operation else base
    if function := _FUNCTION.match(name):
        return _base(function["path"])
    return name


def _base(path: str) -> str:
    """A function's name without namespaces, except the last one if the name is just `kernel`."""
    *spaces, base = path.split("::")
    return f"{spaces[-1]}::{base}" if base == "kernel" and spaces else base


def _operation(arguments: str) -> str | None:
    """The operation named by template arguments, in lower case if it is one word."""
    for pattern, shown in _OPERATIONS:
        if found := re.search(pattern, arguments):
            text = found.expand(shown)
            return text.lower() if _ONE_WORD.fullmatch(text) else text
    return None
