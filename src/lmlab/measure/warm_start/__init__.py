"""Warm start: a study pays for importing torch once, not once per point.

Importing torch and starting CUDA takes 5 to 6 s on a GPU host; many points take less than one. So a
helper process imports the libraries once (`preload`) and waits at a Unix socket (`socket_path`).
For each job it forks a supervisor, which forks the job: a fork copies page tables, not libraries,
and is ready within milliseconds. The caller (`client`) needs no torch.

    client --socket--> helper --fork--> supervisor --fork--> job

The helper must stay forkable. It runs no torch operation: OpenMP's threads do not survive a fork,
and the child's first parallel operation would wait for them forever. It never calls CUDA, not even
to ask whether a GPU exists: after cuInit every CUDA call in a forked child fails.

The supervisor watches the job and the client. When one of them ends, however it ends, every process
that the job has started is killed. Without a helper (LMLAB_WARM_START=0, `cold=True`, or any
problem with it) a fresh interpreter is the supervisor: slower, but otherwise the same.
"""

from lmlab.measure.warm_start.client import run

__all__ = ["run"]
