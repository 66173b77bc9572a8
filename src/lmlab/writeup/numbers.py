"""Numbers as a reader should see them: as many digits as the measurement carries, no more.

A deviation is known to about two digits when it comes from ten samples, so it is printed with two,
and its mean to the same decimal place. A mean keeps at least three digits of its own: where the
deviation is larger than the mean (a first step that loads libraries) rounding to the deviation's
place would print a zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MINUS = "−"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def significant(value: float, digits: int = 3) -> str:
    """A number to a few significant digits, without exponent for everyday magnitudes."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 14:
        return _scientific(value, digits)
    return fixed(value, decimals_for(value, digits))


def exact(value: float) -> str:
    """A number that was set, not measured: whole numbers whole, others to three digits."""
    return f"{value:,.0f}" if value == int(value) else significant(value, 3)


def decimals_for(value: float, digits: int) -> int:
    """Decimal places that show so many significant digits; negative left of the point."""
    if value == 0 or not math.isfinite(value):
        return 0
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 is 10.0 in three digits: one place fewer
    return digits - 1 - math.floor(math.log10(abs(rounded)))


def fixed(value: float, decimals: int) -> str:
    """A number to a decimal place, thousands separated, with a true minus sign."""
    rounded = round(value, decimals)
    text = f"{abs(rounded):,.{max(decimals, 0)}f}"
    return f"{MINUS}{text}" if rounded < 0 else text


def mean_and_deviation(mean: float, sd: float | None) -> str:
    """`12.35 ± 0.12`: two digits of the deviation, the mean to the same place."""
    decimals = shared_decimals(mean, sd)
    if sd is None or math.isnan(sd):
        return fixed(mean, decimals)
    return f"{fixed(mean, decimals)} ± {fixed(sd, decimals)}"


def shared_decimals(mean: float, sd: float | None) -> int:
    """The decimal place at which a mean, its deviation and its median are all printed."""
    own = max(decimals_for(mean, 3), 0)
    if sd is None or math.isnan(sd) or sd == 0:
        return own
    return max(decimals_for(sd, 2), own)


def signed(value: float, digits: int = 2) -> str:
    """An error with its direction."""
    sign = "+" if value > 0 else MINUS if value < 0 else ""
    return f"{sign}{significant(abs(value), digits)}"


def percent(share: float, digits: int = 3) -> str:
    """A share of one as a percentage."""
    return f"{significant(100 * share, digits)} %"


def hidden_words(share: float) -> str:
    """What is hidden of something: `25 %`, and below a tenth of a percent `next to nothing`."""
    return percent(share, 2) if share == 0 or share >= 0.001 else "next to nothing"


def deviation(share: float) -> str:
    """An error of a share to a tenth of a percent, with its direction: `+1.2 %`, `0.0 %`."""
    tenths = round(1000 * share)
    sign = "+" if tenths > 0 else ""
    return f"{sign}{fixed(tenths / 10, 1)} %"


def factor(ratio: float, digits: int = 3) -> str:
    """A ratio as a multiple: `2.31×`."""
    return f"{significant(ratio, digits)}×"


def binary_bytes(count: float) -> str:
    """Bytes in the binary unit that leaves a number a person can read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{significant(count, 3) if count % 1 else f'{count:.0f}'} {unit}"
        count /= 1024
    return f"{significant(count, 3)} TiB"


def span(values: Iterable[float], digits: int = 3) -> str:
    """`1.2 to 3.4`, or the one value when both ends print the same."""
    listed = list(values)
    low, high = significant(min(listed), digits), significant(max(listed), digits)
    return low if low == high else f"{low} to {high}"


def factors(ratios: Iterable[float]) -> str:
    """`1.2× to 3.4×`, or the one multiple when both ends print the same."""
    listed = list(ratios)
    low, high = factor(min(listed)), factor(max(listed))
    return low if low == high else f"{low} to {high}"


def times(ratio: float, digits: int = 3) -> str:
    """A ratio within a sentence: `2.31 times`."""
    return f"{significant(ratio, digits)} times"


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """`1 point`, `7 points`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def every(count: int, singular: str) -> str:
    """`the only point`, `both points`, `all 7 points`."""
    if count > 2:
        return f"all {counted(count, singular)}"
    return f"the only {singular}" if count == 1 else f"both {singular}s"


def excess(ratio: float) -> str:
    """By how much a ratio lies above one: `6.8 %`, and past the double `a factor of 2.4`."""
    return percent(ratio - 1, 2) if ratio < 2 else f"a factor of {significant(ratio, 2)}"


def listed(items: Iterable[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = list(items)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def power_of_ten(value: float) -> str:
    """`10⁻³` for a tick label."""
    return f"10{_superscript(round(math.log10(value)))}"


def _superscript(number: int) -> str:
    return str(number).translate(SUPERSCRIPT)


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{abs(value):.{digits - 1}e}".split("e")
    sign = MINUS if value < 0 else ""
    return f"{sign}{mantissa} × 10{_superscript(int(exponent))}"
