"""Shapes that the tests of the cost model share, and the model of a shape."""

from hypothesis import strategies as st

from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM

shapes = st.builds(
    lambda heads, pairs, **rest: ModelShape(num_heads=heads, d_model=2 * heads * pairs, **rest),
    heads=st.integers(1, 4),
    pairs=st.integers(1, 4),
    vocab_size=st.integers(1, 40),
    context=st.integers(1, 12),
    batch=st.integers(1, 3),
    d_ff=st.integers(1, 40),
    num_layers=st.integers(1, 3),
)


def shape_of(
    batch: int, context: int, d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab: int
) -> ModelShape:
    sizes = {"batch": batch, "context": context, "vocab_size": vocab, "num_heads": num_heads}
    return ModelShape(d_model=d_model, d_ff=d_ff, num_layers=num_layers, **sizes)


# The small model of the study at its shortest context.
SMALL = shape_of(4, 128, 768, 3072, 12, 12, 10_000)


def build(shape: ModelShape, device: str = "meta") -> TransformerLM:
    width, layers = shape.d_model, shape.num_layers
    sizes = shape.vocab_size, shape.context, width, layers, shape.num_heads, shape.d_ff
    return TransformerLM(*sizes, device=device)
