"""LM Lab measures how a Transformer language model runs on a machine and writes the study up.

`model`, `attention`, `kernels` and `parallel` are what is measured, `measure` is how, `study` says
what a study asks for and where results live, `jobs` runs a point, `chapters` holds everything about
one chapter in one package, and `report` turns results into pages. Importing this package imports
none of them: the workflow is parsed without torch.
"""

__version__ = "0.2.0"
