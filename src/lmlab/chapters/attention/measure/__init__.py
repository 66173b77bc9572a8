"""Attention in eight topics, one module each, from the plain formula to our own kernels.

- `naive`: what the plain formula costs in time and memory, eager and compiled.
- `softmax`: the operations of the plain formula one by one, softmax fused and written out.
- `model_compile`: the whole model, eager and compiled.
- `benchmark`: every variant at one shape; forward, backward and both, with memory and host time.
- `shapes`: the same with the heads, head dimension and contexts of the study's models.
- `tiles`: our kernels with different tile sizes.
- `leaderboard`: the one shape with published results.
- `model`: a training step of a model with each attention.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
