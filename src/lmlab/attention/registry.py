"""Registry of attention variants by name; loading one does not import the others.

Every variant is a function `attention(q, k, v, *, is_causal) -> Tensor` over tensors of shape
(..., sequence, head_dim). The registry stores import paths as strings and imports a variant only
when it is loaded, so a point depends only on the files of its variant, and the workflow can look
them up with `path_of` without importing torch.

A new variant is one line in `VARIANTS`; CONTRIBUTING lists what else a study needs. Users' own
variants need no entry: a name with a colon, "package.module:function", is used as the import path.
"""

from typing import TYPE_CHECKING, Protocol, cast

from lmlab import import_path

if TYPE_CHECKING:
    from torch import Tensor


class Attention(Protocol):
    """The interface of a variant; q, k, v and the result are (..., sequence, head_dim)."""

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor", *, is_causal: bool) -> "Tensor": ...


VARIANTS: dict[str, str] = {
    "naive": "lmlab.attention.naive:attention",
    "unfused": "lmlab.attention.unfused:attention",
    "compiled": "lmlab.attention.compiled:attention",
    "sdpa_flash": "lmlab.attention.sdpa:flash",
    "sdpa_cudnn": "lmlab.attention.sdpa:cudnn",
    "sdpa_efficient": "lmlab.attention.sdpa:efficient",
    "sdpa_math": "lmlab.attention.sdpa:math",
    "flex": "lmlab.attention.flex:attention",
    "tiled": "lmlab.attention.tiled:attention",
    "flash": "lmlab.attention.flash:attention",
    "flash_compiled_backward": "lmlab.attention.flash_compiled_backward:attention",
    "flash_attn_4": "lmlab.attention.flash_attn_4:attention",
    "flash_attn_4_deterministic": "lmlab.attention.flash_attn_4:deterministic",
}


def path_of(name: str) -> str:
    """Import path "module:function" of a variant; imports nothing."""
    if name in VARIANTS:
        return VARIANTS[name]
    if ":" not in name:
        raise ValueError(
            f"attention: {name!r} is not known; allowed: {', '.join(sorted(VARIANTS))}"
            " or your own 'package.module:function'"
        )
    return name


def load(name: str) -> Attention:
    """Load the attention function of that name; imports only its module."""
    function = import_path.resolve(path_of(name))
    if not callable(function):
        raise ValueError(f"attention: {name!r} is not a function, it is {function!r}")
    # Keyword and shapes cannot be checked without calling it.
    return cast(Attention, function)
