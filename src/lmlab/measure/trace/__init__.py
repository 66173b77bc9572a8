"""What ran on the device, launch by launch: two profilers read into the same frames.

`nsys` reads Nsight Systems' SQLite export and `chrome_trace` what PyTorch's profiler writes; both
end in `frames`, and everything after (`summary`, `gpu_time`, and reduced for keeping `digest` and
`timeline`) knows only the frames. `ranges`, `annotate` and `attention_parts` put names on what is
profiled; `torch_profiler` runs it, or `nsys_capture` where nsys, which `nsys_command` finds and
speaks to, records from outside. Importing this imports no torch.
"""
