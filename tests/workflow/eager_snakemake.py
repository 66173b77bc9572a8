"""Snakemake whose Slurm executor asks for the status of its jobs every second.

The executor waits ten seconds longer after every question, which suits a cluster and not a test.
"""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

if __name__ == "__main__":
    always_1 = property(lambda executor: 1, lambda executor, seconds: None)
    Executor.next_seconds_between_status_checks = always_1
    main()
