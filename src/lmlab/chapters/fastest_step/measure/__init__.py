"""The fastest training step in three topics, one module each.

- `ladder`: a model of the study, from the plain fp32 step to the best one.
- `kernels`: our fused AdamW and our fused LM head and loss, against PyTorch's.
- `leaderboard`: a step of an 8B-shaped model on a long sequence, with as many layers as fit.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
