"""Where the memory goes: the modes of one model, one of its blocks, or ways to checkpoint it.

`timeline` records three modes one after the other in one process, the allocator emptied and its
counters reset in between: `forward` without a graph, `forward_graph` (the graph that backward needs
is kept and nothing follows: what published peaks of a forward pass mean) and `train_step`. Each
runs once unrecorded first, so that libraries have their workspaces and the optimizer its state. A
mode that runs out of memory is a record with a reason; the other modes keep their numbers.

`long_context` is the same with one sequence. `block` and `checkpointing` have modules of their own.

Records of `timeline` and `long_context`, per `mode`:

- `peak_memory`: the allocator's own counter on a GPU, the replayed history on a CPU; `peak_phase`,
  `replayed_peak`, `requested_peak` (without the allocator's rounding), `unrecorded_peak` (of the
  warm-up step), and `phase_peak` and `phase_end` per `phase`
- `live` per `category`, `attention_weights` per `dtype` (a part of the activations), `live_by_line`
  and `allocation` (the largest ones, equal ones together) with their `origin`: what exists at the
  `stage` "peak" or, where memory ran out, "failure"
- `predicted_peak` and `predicted_live` by the cost model, our model with naive attention only
- `device_memory` per `layer`, from what the driver counts to what tensors asked for
- `stream_allocations`, `stream_live`: tensors as large as one of the residual stream
- `events`, `peak_event`, `live_pieces`, `history_cut` of the recording

and once per point `stream_bytes`, `parameters`, `device_memory` before the model exists. `data` has
each mode's timeline by category and the phases among its events.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
