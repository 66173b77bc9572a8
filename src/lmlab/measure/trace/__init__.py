"""What ran on the device, launch by launch: two profilers read into the same data frames.

`nsys` reads an Nsight Systems export and `chrome_trace` the PyTorch profiler's output; both end in
`frames`, which `digest` reduces. `ranges` names what is profiled; `recording` runs it under the
PyTorch profiler, or under an nsys that was started around the process with the options of
`nsys_command`. Importing this package does not import torch.
"""
