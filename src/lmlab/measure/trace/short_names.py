"""Short kernel names for tables, with just enough detail to distinguish two kernels.

A demangled PyTorch kernel name has hundreds of characters because the operation is a lambda inside
a template argument:

    void at::native::vectorized_elementwise_kernel<(int)4, at::native::exp_kernel_cuda(...)...>(...)

It becomes `vectorized_elementwise_kernel<exp>`: the kernel's base name, and the operation if a rule
finds one among the template arguments. cuBLAS names lose scheduling details; names of Triton
kernels and CPU operators are unchanged. A name that is still too long loses its middle, because the
end often holds the distinguishing number. Different kernels may share a short name; tables group by
the full one.
"""

from __future__ import annotations

import re

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
_COMPILED = [(re.compile(pattern), shown) for pattern, shown in _OPERATIONS]
_ONE_WORD = re.compile(r"[A-Z][a-z]+( scalar)?")

# Applied first: spelling variants, and details that do not distinguish two kernels of a table.
_SPELLINGS = (
    (re.compile(r"^(Mem(?:cpy|set)(?: [A-Z]to[A-Z])?)\b.*"), r"\1"),
    (re.compile(r"<unnamed>|\(anonymous namespace\)"), "unnamed"),
    (re.compile(r"^std::enable_if<[^>]*>::type "), ""),
    (re.compile(r"_stage\d+|_warp(group)?size\d+x\d+x\d+|_align[abc]\d+|_execute"), ""),
    (re.compile(r"(?:_kernel)?__5x_cublas$"), ""),
    (re.compile(r"_tilesize(?=\d)"), "_tile"),
)
_TEMPLATE = re.compile(r"^(?:[\w ]+ )?(?P<path>[\w:]+)<(?P<arguments>.*)$", re.DOTALL)
_FUNCTION = re.compile(r"^(?:\w+ )?(?P<path>[\w:]+)\(.*$", re.DOTALL)


def shorten(name: str) -> str:
    """A kernel's name in at most MAX_LENGTH characters."""
    for spelling, plain in _SPELLINGS:
        name = spelling.sub(plain, name)
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
    for pattern, shown in _COMPILED:
        if found := pattern.search(arguments):
            text = found.expand(shown)
            return text.lower() if _ONE_WORD.fullmatch(text) else text
    return None
