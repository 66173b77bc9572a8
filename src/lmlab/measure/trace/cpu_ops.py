"""What takes the place of kernels on a CPU: the operators that do work, each with its self time.

The PyTorch profiler records operators that call one another: `linear` calls `matmul` calls `mm`,
and adding them up would count one product three times. An operator's self time is its duration
minus that of the operators it called; self times add up to the time in which any operator ran.
Taking only the leaves would be wrong: `mm` and `mean` do their work and also call others (to
resolve a conjugate, to fill).

Some operators compute and some only do bookkeeping: views, allocation, dispatch. On a GPU the
latter launch nothing and show up as gaps, so here they go to the host side, and the tables of a CPU
have the same kind of rows as those of a GPU. Bookkeeping is a composite operator that no family
rule matches, a view, or anything of the autograd engine.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace import families
from lmlab.measure.trace.frames import Integers

_BOOKKEEPING = re.compile(
    r"aten::(as_strided|_?(unsafe_)?view(_as)?|_?reshape(_alias|_as)?|t|transpose|permute|movedim"
    r"|expand(_as)?|select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|flatten|unflatten"
    r"|unfold|diagonal|alias|detach|lift_fresh|set|real|m?T|empty\w*|new_empty\w*|resize|resolve_\w+"
    r"|result_type|promote_types|can_cast|to|_to_copy|contiguous|is_\w+|item|_local_scalar_dense"
    r"|_has_compatible_shallow_copy_type|_has_same_storage_numel|linear|matmul|softmax|zeros|ones)_?"
)


def callers(thread: Integers, start_ns: Integers, duration_ns: Integers) -> Integers:
    """Row of the operator that directly called each one; -1 if no operator did."""
    parents = np.full(len(start_ns), -1, dtype=np.int64)
    end_ns = start_ns + duration_ns
    stack: list[int] = []
    for row in np.lexsort((-duration_ns, start_ns, thread)).tolist():
        while stack and (thread[stack[-1]] != thread[row] or end_ns[stack[-1]] <= start_ns[row]):
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return parents


def self_times(duration_ns: Integers, parents: Integers) -> Integers:
    """Each operator's duration minus that of the operators it called."""
    called = parents >= 0
    in_children = np.zeros(len(duration_ns), dtype=np.int64)
    np.add.at(in_children, parents[called], duration_ns[called])
    # Rounding can make children longer than their parent.
    return np.maximum(duration_ns - in_children, 0)


def does_work(names: pd.Series, parents: Integers) -> npt.NDArray[np.bool_]:
    """Which operators compute or move data, as a kernel would on a GPU."""
    composite = np.zeros(len(parents), dtype=bool)
    composite[parents[parents >= 0]] = True
    matched = names.map(lambda name: families.rule_of(name) is not None).to_numpy(dtype=bool)
    bookkeeping = names.map(_is_bookkeeping).to_numpy(dtype=bool)
    return ~bookkeeping & (matched | ~composite)


def _is_bookkeeping(name: str) -> bool:
    return "::" not in name or "autograd::" in name or bool(_BOOKKEEPING.fullmatch(name))
