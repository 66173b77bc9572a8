"""What ran on the device, launch by launch: two profilers read into the same frames.

`nsys` reads Nsight Systems' SQLite export and `chrome_trace` what PyTorch's profiler writes; both
end in `frames`, and everything after (`summary`, `gpu_time`) knows only the frames. `ranges` and
`annotate` put names on what is profiled, `torch_profiler` runs it. Importing this imports no torch.
"""
