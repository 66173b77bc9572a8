"""What stands for kernels on a CPU: the operators that do work, each with its own time.

PyTorch's profiler records operators that call one another: `linear` calls `matmul` calls `mm`, and
adding them up counts one product three times. An operator's own time is its duration less that of
the operators it called; these add up to the time in which any operator ran. Leaves alone would not
do: `mm` and `mean` do their work and call others besides (to resolve a conjugate, to fill).

Of the operators some compute and some only arrange: views, allocation, dispatch. On a GPU the
latter launch nothing and show as gaps, so here they go to the host side, and the tables of a CPU
have the same kind of rows as those of a GPU. What arranges is an operator that no family claims
and that calls others, a view, or anything of the autograd engine.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from lmlab.measure.trace import families
from lmlab.measure.trace.frames import Coded, Integers

_ARRANGES = re.compile(
    r"aten::(as_strided|_?(unsafe_)?view(_as)?|_?reshape(_alias|_as)?|t|transpose|permute|movedim"
    r"|expand(_as)?|select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|flatten|unflatten"
    r"|unfold|diagonal|alias|detach|lift_fresh|set|real|m?T|empty\w*|new_empty\w*|resize|resolve_\w+"
    r"|result_type|promote_types|can_cast|to|_to_copy|contiguous|is_\w+|item|_local_scalar_dense"
    r"|_has_compatible_shallow_copy_type|_has_same_storage_numel|linear|matmul|softmax|zeros|ones)_?"
)


def callers(thread: Integers, start_ns: Integers, duration_ns: Integers) -> Integers:
    """Row of the operator that directly called each one, -1 for those called by no operator."""
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


def own_times(duration_ns: Integers, parents: Integers) -> Integers:
    """Each operator's duration less that of the operators that it called."""
    called = parents >= 0
    of_children = np.zeros(len(duration_ns), dtype=np.int64)
    np.add.at(of_children, parents[called], duration_ns[called])
    # The clock's last digit can make children longer than their parent.
    return np.maximum(duration_ns - of_children, 0)


def does_work(names: Coded[str], parents: Integers) -> npt.NDArray[np.bool_]:
    """Which of the operators compute or move data, and so stand where a GPU has a kernel."""
    composite = np.zeros(len(parents), dtype=bool)
    composite[parents[parents >= 0]] = True
    as_leaf = np.array([_works(name, composite=False) for name in names.values], dtype=bool)
    as_composite = np.array([_works(name, composite=True) for name in names.values], dtype=bool)
    return np.where(composite, as_composite[names.codes], as_leaf[names.codes])


def _works(name: str, *, composite: bool) -> bool:
    """A composite operator works if a family claims it, a leaf unless it is known to arrange."""
    if "::" not in name or "autograd::" in name or _ARRANGES.fullmatch(name):
        return False
    return families.rule_of(name) is not None or not composite
