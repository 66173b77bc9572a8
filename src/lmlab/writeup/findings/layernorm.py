"""What in LayerNorm is sensitive: the range of a square, and the digits of a mean of squares.

A variance squares its input, so its exponent is twice the input's: fp16 ends at 65,504 and with it
the squares of anything beyond 256. bf16 has the exponents of fp32 and no such end, but keeps only
eight bits of each square. The two are different needs, and a type may meet one and not the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.numbers import exact, listed, significant

# A type whose error is this many times that of fp32 has lost digits that fp32 keeps.
FEWER_DIGITS_FROM = 10.0
# An error this many times the typical one is digits lost, not rounding that happens to be larger.
FADING_FROM = 10.0
# The formats' own limits: 2 - 2**-digits times the largest power of two.
LARGEST_NUMBER = {
    "fp16": (2 - 2**-10) * 2.0**15,
    "bf16": (2 - 2**-7) * 2.0**127,
    "fp32": (2 - 2**-23) * 2.0**127,
}
# Below this share of it every row's variance fits, not only the mean over the rows that is known.
FITS_BELOW = 0.5


def variance_range(rows: pd.DataFrame) -> str:
    """Which types lose the variance outright, and at which scales."""
    if not len(rows):
        return "Which types can hold the variance is not known: it was not measured."
    told = [_range_of(str(dtype), here) for dtype, here in rows.groupby("dtype", sort=False)]
    return " ".join(told)


def _range_of(dtype: str, rows: pd.DataFrame) -> str:
    tested = sorted(rows["scale"])
    fates = {"overflows": rows["overflow"], "vanishes": rows["underflow"]}
    parts = [
        f"{fate} at {_scales(sorted(rows['scale'][lost]), tested)}"
        for fate, lost in fates.items()
        if lost.any()
    ]
    if not parts:
        return f"In {dtype} the variance stays in range at {_scales(tested, tested)}."
    return f"In {dtype} the variance {listed(parts)}.{_squares_alone(dtype, rows)}"


def _squares_alone(dtype: str, rows: pd.DataFrame) -> str:
    """Where it is not the variance that is too large for the type but squares on the way to it."""
    largest = LARGEST_NUMBER[dtype]
    fitting = rows[rows["overflow"] & (rows["true_variance"] < FITS_BELOW * largest)]
    if not len(fitting):
        return ""
    scales = _scales(sorted(fitting["scale"]), sorted(rows["scale"]))
    height = significant(fitting["true_variance"].max())
    at_most = " at most" if len(fitting) > 1 else ""
    return (
        f" At {scales} the variance itself ({height}{at_most}) would fit below "
        f"{significant(largest, 5)}, the largest number of {dtype}; single squares do not."
    )


def _scales(some: Sequence[float], tested: Sequence[float]) -> str:
    """Scales in words that claim nothing beyond or between those tested."""
    first = tested.index(some[0])
    if len(some) == 1:
        ends = {tested[0]: " (the smallest tested)", tested[-1]: " (the largest tested)"}
        end = ends.get(some[0], "") if len(tested) > 1 else " (the only one tested)"
        return f"a scale of {exact(some[0])}{end}"
    if list(some) == list(tested[first : first + len(some)]):
        return f"every scale tested from {exact(some[0])} to {exact(some[-1])}"
    return f"scales of {listed(exact(scale) for scale in some)}"


def variance_digits(rows: pd.DataFrame) -> str:
    """How exact the variance is where it is in range, from the most exact type to the least."""
    errors = _typical_errors(rows)
    if not errors:
        return "How exact the variance is, is not known: no scale is in range."
    ranked = sorted(errors.items(), key=lambda item: item[1])
    told = [f"{significant(error, 2)} in {dtype}" for dtype, error in ranked]
    typical = f"Where it is in range its relative error is typically {listed(told)}."
    return " ".join([typical, *_losses(rows, errors)])


def _losses(rows: pd.DataFrame, errors: dict[str, float]) -> list[str]:
    """Types whose digits fade before the variance vanishes."""
    told = []
    for dtype, typical in errors.items():
        inside = _in_range(rows[rows["dtype"] == dtype])
        worst = inside.iloc[int(inside["relative_error"].argmax())]
        if worst["relative_error"] >= FADING_FROM * typical:
            told.append(
                f"Towards the end of its range {dtype} loses digits: the error reaches "
                f"{significant(worst['relative_error'], 2)} at a scale of {exact(worst['scale'])}."
            )
    return told


def enough_range_and_digits(rows: pd.DataFrame, dtype: str = "bf16", base: str = "fp32") -> str:
    """Whether computing in the type makes fp32 statistics unnecessary."""
    errors = _typical_errors(rows)
    if dtype not in errors or base not in errors:
        return f"Whether {dtype} removes the need for {base} statistics is not known: not measured."
    here = rows[rows["dtype"] == dtype]
    in_range = not (here["overflow"] | here["underflow"]).any()
    worse = errors[dtype] >= FEWER_DIGITS_FROM * errors[base]
    ratio = significant(errors[dtype] / errors[base], 2) if errors[base] else "many"
    lost = f"its error is {ratio} times that of {base}"
    if in_range and worse:
        return (
            f"{dtype} has the range but not the precision: nothing overflows or vanishes, but "
            f"{lost}, so it does not remove the need for {base} statistics."
        )
    if in_range:
        return (
            f"{dtype} has the range and, on these inputs, the precision: {lost}, so it removes the "
            f"need for {base} statistics."
        )
    if worse:
        return f"{dtype} has neither the range nor the precision: within its range {lost}."
    return f"{dtype} has the precision ({lost}) but not the range, so {base} is needed for range."


def output_finite(rows: pd.DataFrame) -> str:
    """Whether LayerNorm as a library does it survives the same inputs."""
    if not len(rows):
        return "PyTorch's own LayerNorm was not measured on these inputs."
    told = []
    for dtype, here in rows.groupby("dtype", sort=False):
        lost = here["scale"][here["largest_error"].isna()]
        if len(lost):
            told.append(f"in {dtype} it is not finite at {listed(exact(s) for s in lost)}")
        else:
            told.append(
                f"in {dtype} it is off by at most {significant(here['largest_error'].max(), 2)}"
            )
    fate = (
        "stays finite at every scale" if rows["largest_error"].notna().all() else "does not survive"
    )
    return f"The output of PyTorch's own LayerNorm on these inputs {fate}: {listed(told)}."


def _in_range(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["overflow"] & ~rows["underflow"] & rows["relative_error"].notna()]


def _typical_errors(rows: pd.DataFrame) -> dict[str, float]:
    return {
        str(dtype): float(here["relative_error"].median())
        for dtype, here in _in_range(rows).groupby("dtype", sort=False)
    }
