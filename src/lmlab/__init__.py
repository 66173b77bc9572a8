"""LM Lab measures how a Transformer language model runs on a machine and writes the study up.

The rooms, from the ground: `attention` and `model` are what is measured, `measure` is how,
`study` says what and where results live, `experiments` join them, `writeup` turns results into
pages. Importing this package imports none of them: the workflow is parsed without torch.
"""

__version__ = "0.1.0"
