"""Where the memory goes: the modes of one model, one of its blocks, or ways to checkpoint it.

`timeline` records three modes one after the other in one process, emptying the allocator and
resetting its counters in between: `forward` without a graph, `forward_graph` (forward only, but the
graph for backward is kept, as in published forward peaks) and `train_step`. Each mode first runs
once unrecorded, so that library workspaces and optimizer state exist. A mode that runs out of
memory yields a record with the reason; the other modes keep their numbers.

`long_context` is the same at batch 1. `block` and `checkpointing` have modules of their own.

Records of `timeline` and `long_context`, per `mode`:

- `peak_memory`: the allocator's own counter on a GPU, the replayed history on a CPU; `peak_phase`,
  `replayed_peak`, `requested_peak` (without the allocator's rounding), `unrecorded_peak` (of the
  warm-up step), and `phase_peak` and `phase_end` per `phase`
- memory live at the `stage` "peak" or, if memory ran out, "failure": `live` per `category`,
  `attention_weights` per `dtype` (part of the activations), and with their `origin` `live_by_line`
  and `allocation` (the largest; equal ones share a record)
- `predicted_peak` and `predicted_live` by the cost model, our model with naive attention only
- `device_memory` per `layer`, from the driver's total down to the bytes that tensors requested
- `stream_allocations`, `stream_live`: tensors as large as one of the residual stream
- `events`, `peak_event`, `live_pieces`, `history_cut` of the recording

and once per point `stream_bytes`, `parameters`, and `device_memory` before the model exists. `data`
has each mode's timeline by category, with its phases as event ranges.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
