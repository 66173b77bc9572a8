"""Kernel names for print: what a reader needs to tell two kernels apart, and no more.

A demangled name of PyTorch runs to hundreds of characters because the operation is a lambda inside
a template argument:

    void at::native::vectorized_elementwise_kernel<(int)4, at::native::exp_kernel_cuda(...)...>(...)

Printed, that is `vectorized_elementwise_kernel<exp>`: the kernel's base name, and the operation
where a rule finds one among the template arguments. Names without templates (cuBLAS, Triton, CPU
operators) are short already and stay. Different kernels may share a short name; tables group by the
whole one.
"""

from __future__ import annotations

import re

LONGEST = 64

# What to print for the operation inside the template arguments; the first that is found is taken.
_OPERATIONS = (
    (r"\b(cutlass_?[\w.]*gemm\w*)", r"\1"),
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
)
_COMPILED = [(re.compile(pattern), shown) for pattern, shown in _OPERATIONS]
_MEMORY = re.compile(r"^(Mem(?:cpy|set)(?: [A-Z]to[A-Z])?)\b.*")
_UNNAMED = re.compile(r"<unnamed>|\(anonymous namespace\)")
_FUNCTION_OF_TEMPLATE = re.compile(r"^(?:[\w ]+ )?(?P<path>[\w:]+)<(?P<arguments>.*)$", re.DOTALL)
_PLAIN_FUNCTION = re.compile(r"^(?:\w+ )?(?P<path>[\w:]+)\(.*$", re.DOTALL)


def shorten(name: str) -> str:
    """A kernel's name for print, at most LONGEST characters."""
    short = _shortened(_UNNAMED.sub("unnamed", _MEMORY.sub(r"\1", name)))
    return short if len(short) <= LONGEST else short[: LONGEST - 1] + "…"


def _shortened(name: str) -> str:
    if template := _FUNCTION_OF_TEMPLATE.match(name):
        base = template["path"].rpartition("::")[2]
        operation = _operation(template["arguments"])
        if operation and operation.startswith("cutlass"):
            return operation
        return f"{base}<{operation}>" if operation else base
    if function := _PLAIN_FUNCTION.match(name):
        return function["path"].rpartition("::")[2]
    return name


def _operation(arguments: str) -> str | None:
    """The operation that template arguments name, lower case where it is a functor's."""
    for pattern, shown in _COMPILED:
        if found := pattern.search(arguments):
            text = found.expand(shown)
            return text if text.startswith("cutlass") else text.lower()
    return None
