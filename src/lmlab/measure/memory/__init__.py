"""Where memory goes: what an allocator did during a step, replayed and explained.

recorder    records one step with marks between its phases, on a GPU or on a CPU
snapshot    converts torch's memory snapshot to a history
history     allocations and frees in order, replayed into a table of lifetimes
observer    what the forward pass allocates, operator by operator, and from which line
summary     what a result stores: the peak by category, lists, a timeline with every peak
accounting  from what nvidia-smi shows to what tensors request, layer by layer
"""
