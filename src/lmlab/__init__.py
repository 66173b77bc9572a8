"""LM Lab measures how a Transformer language model runs on a machine and writes a report.

`model`, `attention`, `kernels` and `parallel` are the code under test, `measure` times it, `study`
defines the configuration, the points and where results live, `jobs` runs a point, `chapters` has
one package per chapter, and `report` turns results into pages. Importing this package imports none
of them, so the workflow can be parsed without torch.
"""

__version__ = "0.2.0"
