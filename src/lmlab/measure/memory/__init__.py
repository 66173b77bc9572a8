"""Where memory goes: what an allocator did during a step, replayed and explained.

recorder    records one step with marks between its phases, on a GPU or on a CPU
snapshot    torch's memory snapshot as a history; untrusted pickles are read safely
blocks      how many bytes the allocator gave, where the trace has only the requested size
cpu_events  the same history from the profiler's memory events
history     what both become: allocations, frees, what was live at the end
replay      lifetimes, active bytes over time, the peak and what was live there
categories  parameters, gradients, activations ...: what an allocation is for
sources     which line of the program requested it
summary     what a result keeps: the peak by category, lists, a timeline with every peak
accounting  from what nvidia-smi shows to what tensors request, step by step
"""
