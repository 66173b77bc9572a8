"""The numbers that make a model and a batch, and what they must satisfy. No torch.

The model, its cost and the configuration all speak of the same few integers. They are checked in
one place, so that a wrong one is named the same way whether it is met when a study is read, when a
cost is predicted or when the model is built.
"""

from dataclasses import dataclass


class ShapeError(ValueError):
    """A hyper-parameter no model can be built with; the message is one line for the user."""


def check_positive_integers(**values: object) -> None:
    """Each value is an integer of at least 1, or a ShapeError names the one that is not."""
    for name, value in values.items():
        # True is an int to Python, but nobody means one layer by it.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{name}: {value!r} is not allowed; an integer of at least 1 is")


def check_heads(d_model: int, num_heads: int) -> None:
    """Heads share d_model evenly, and each has whole pairs of features for RoPE to rotate."""
    if d_model % num_heads:
        raise ShapeError(f"num_heads: {num_heads} does not divide d_model, which is {d_model}")
    if (d_model // num_heads) % 2:
        raise ShapeError(
            f"num_heads: {num_heads} gives a head dimension of {d_model // num_heads} at d_model"
            f" {d_model}; RoPE rotates pairs and needs an even one"
        )


def check_rope_theta(rope_theta: object) -> None:
    """The base of RoPE's wavelengths is a number above 0."""
    is_number = isinstance(rope_theta, int | float) and not isinstance(rope_theta, bool)
    if not is_number or not 0 < rope_theta < float("inf"):  # type: ignore[operator]
        raise ShapeError(f"rope_theta: {rope_theta!r} is not allowed; a number above 0 is")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's hyper-parameters together with the batch that it is given."""

    vocab_size: int
    """Rows of the embedding, and of the head, which is not tied to it."""
    context: int
    """Tokens of each sequence in the batch."""
    batch: int
    """Sequences in the batch."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width of the feed-forward network."""
    num_layers: int
    """Transformer blocks."""
    num_heads: int
    """Attention heads of each block."""

    def __post_init__(self) -> None:
        check_positive_integers(**vars(self))
        check_heads(self.d_model, self.num_heads)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.context

    @property
    def scores(self) -> int:
        """Query-key pairs of one layer, the masked half included."""
        return self.batch * self.num_heads * self.context * self.context
