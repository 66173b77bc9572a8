"""Where memory goes: what an allocator did during a step, replayed and explained.

recorder    records one step with marks between its phases, on a GPU or on a CPU
snapshot    torch's memory snapshot as a history; pickles are read without trusting them
blocks      how many bytes the allocator gave, where only those asked for are written down
cpu_events  the same history from the profiler's memory events
history     what both become: allocations, frees, what was live at the end
replay      lifetimes, active bytes over time, the peak and who was live there
categories  parameters, gradients, activations ...: what an allocation is for
sources     which line of the program asked for it
envelope    a timeline small enough for a picture, with every bucket's peak in it
accounting  from what nvidia-smi shows to what tensors ask for, step by step
"""
