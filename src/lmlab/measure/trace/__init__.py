"""Device activity, launch by launch: the output of two profilers as the same data frames.

`nsys` reads an Nsight Systems export and `chrome_trace` the PyTorch profiler's output; both produce
the `frames` that `digest` summarizes. `ranges` names parts of the program; `recording` runs it
under the PyTorch profiler, or under an nsys that was started around the process with the options
from `nsys_command`. Importing this package does not import torch.
"""
