"""Snakemake's display for a study: a line a point, with what is left and what the last one gave.

Snakemake imports every logger plugin while it builds its command line. That makes this the place
for a repair too: `snakemake --cores 1 --resources gpu=1 report/writeup.md` is what anyone would
type, and Snakemake's parser takes the target for a resource (see `command_line`).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from snakemake_logger_plugin_lmlab import allocation
from snakemake_logger_plugin_lmlab.command_line import repair
from snakemake_logger_plugin_lmlab.display import Display
from snakemake_logger_plugin_lmlab.progress import Progress

__all__ = ["LogHandler"]

repair(sys.argv)

# What Snakemake prints of a single job takes ten lines; the study has hundreds of jobs.
REPLACED = {
    LogEvent.JOB_INFO,
    LogEvent.JOB_STARTED,
    LogEvent.JOB_FINISHED,
    LogEvent.GROUP_INFO,
    LogEvent.GROUP_ERROR,
    LogEvent.PROGRESS,
    LogEvent.SHELLCMD,
    LogEvent.WORKFLOW_STARTED,
    LogEvent.RESOURCES_INFO,
}

# Said before every job, with nothing in it.
CHATTER = "Select jobs to execute..."


class LogHandler(LogHandlerBase):
    """Prints points as they are measured, and everything else as Snakemake would."""

    def __post_init__(self) -> None:
        """Start with nothing measured; the first message brings the number of jobs."""
        self.progress = Progress()
        self.display = Display(sys.stderr)
        self.in_full = self.common_settings.dryrun or self.common_settings.verbose

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message, or fold it into the progress."""
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            self.progress.expect(getattr(record, "stats", {}))
        if event == LogEvent.JOB_ERROR and not self._is_shown(vars(record)):
            return
        if self.in_full or event not in REPLACED:
            text = self.format(record)
            if text and text not in ("None", CHATTER):
                self.display.message(text)
            return
        self._show(event, vars(record))

    def _is_shown(self, error: dict[str, Any]) -> bool:
        """A job that failed is; one that only shared an allocation with it is not."""
        return self.in_full or not error["indent"] or allocation.broke(error)

    def _show(self, event: LogEvent, fields: dict[str, Any]) -> None:
        if event == LogEvent.GROUP_INFO:
            self.display.running(self.progress.share([job.jobid for job in fields["jobs"]]))
        elif event == LogEvent.GROUP_ERROR:
            self.display.message(allocation.failure(fields))
        elif event == LogEvent.JOB_INFO:
            running = self.progress.start(
                fields["jobid"], fields["rule_name"], fields["wildcards"], fields["output"]
            )
            if not fields["indent"]:  # of a group, its own line says enough
                self.display.running(running)
        elif event == LogEvent.JOB_FINISHED:
            line = self.progress.finish(fields["job_id"])
            if line:
                self.display.message(line)

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        self.display.end()
        super().close()

    @property
    def writes_to_stream(self) -> bool:
        """It replaces Snakemake's own output."""
        return True

    @property
    def writes_to_file(self) -> bool:
        """Snakemake keeps its own log file in full."""
        return False

    @property
    def has_filter(self) -> bool:
        """Snakemake's filter applies (`--quiet`)."""
        return False

    @property
    def has_formatter(self) -> bool:
        """Snakemake's formatter writes what is not about a single job."""
        return False

    @property
    def needs_rulegraph(self) -> bool:
        """Job counts are enough."""
        return False
