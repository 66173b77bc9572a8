"""Hyperparameters of the model and the batch, and their checks. No torch.

The checks are shared by the configuration, the cost model and the model itself, so that an invalid
value gives the same error everywhere.
"""

from dataclasses import dataclass


class ShapeError(ValueError):
    """An invalid hyperparameter; the message is one line for the user."""


def check_positive_integers(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{name} must be an integer of at least 1, got {value!r}")


def check_heads(d_model: int, num_heads: int) -> None:
    """Raise unless d_model splits evenly into heads of even size, which RoPE needs."""
    if d_model % num_heads:
        raise ShapeError(f"num_heads: {num_heads} does not divide d_model, which is {d_model}")
    if (d_model // num_heads) % 2:
        raise ShapeError(
            f"num_heads: {num_heads} gives a head dimension of {d_model // num_heads} at d_model"
            f" {d_model}; RoPE rotates pairs and needs an even one"
        )


def check_rope_theta(rope_theta: object) -> None:
    is_number = isinstance(rope_theta, int | float) and not isinstance(rope_theta, bool)
    if not is_number or not 0 < rope_theta < float("inf"):  # type: ignore[operator]
        raise ShapeError(f"rope_theta must be a positive number, got {rope_theta!r}")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The hyperparameters of a model and of its batch."""

    vocab_size: int  # rows of the embedding and of the head, which are not tied
    context: int  # tokens per sequence
    batch: int  # sequences per batch
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    def __post_init__(self) -> None:
        check_positive_integers(**vars(self))
        check_heads(self.d_model, self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def scores(self) -> int:
        """Query-key pairs of one layer, including the masked half."""
        return self.batch * self.num_heads * self.context * self.context
