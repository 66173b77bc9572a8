"""Snakemake with a Slurm executor that polls its jobs every second.

Normally it waits ten seconds longer after each poll, which suits a cluster but not a test.
"""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

if __name__ == "__main__":
    always_1 = property(lambda executor: 1, lambda executor, seconds: None)
    Executor.next_seconds_between_status_checks = always_1
    main()
