"""Warm start: a measurement pays for starting Python and torch once, not once a point.

Importing torch takes two seconds, on a GPU host with CUDA behind it five to six, and a point often
takes less than one. So a small client without torch finds or starts a helper, a process that has
torch imported and waits; the helper forks a child for every job, and the child is ready within
milliseconds because fork copies page tables, not libraries.

Two things must never happen in the helper, since a fork does not survive them. It runs no torch
operation: a parallel one starts OpenMP's threads, fork copies only the calling thread, and the
child's first parallel operation then waits for ever for the ones left behind. And it asks CUDA
nothing, not even whether it is there: after cuInit every CUDA call in a forked child fails. It
also holds nothing of ours when a job starts, so that an edit of our code is never stale.

`client` is what callers use, `starting` finds or starts the helper at the `meeting_place`,
`messages` is what the two say to each other, `helper` serves, `libraries` is what it holds ready,
`child` is a forked job's life, `job` calls the module's `main`, and `processes` makes sure that
nothing outlives its purpose. Switched off with LMLAB_WARM_START=0, or where it cannot work, every
job is a fresh process: the same, slower.
"""

from lmlab.measure.warm_start.client import run

__all__ = ["run"]
