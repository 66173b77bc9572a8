"""Snakemake's progress display: one line per measured point, with its result and what is left.

Snakemake imports every logger plugin before it parses its command line. That makes this the place
to repair `snakemake --cores 1 --resources gpu=1 report/writeup.md`, whose target Snakemake would
parse as a resource, and to cope with a home that is not writable (see `command_line`).
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from lmlab.study.results import ResultError, read
from snakemake_logger_plugin_lmlab.command_line import ensure_writable, is_snakemake, repair

__all__ = ["LogHandler"]

if is_snakemake(sys.argv):
    repair(sys.argv)
    ensure_writable(os.environ)

# Snakemake prints ten lines per job; a study has hundreds of jobs. Only these events are printed in
# its own format; None is a plain message.
SHOWN = {None, LogEvent.RUN_INFO, LogEvent.ERROR, LogEvent.DEBUG_DAG}
EMPTY = {"", "None", "Select jobs to execute..."}
SHELL_FAILED = "RuleException:\nCalledProcessError"
INTERRUPT = "Terminating processes on user request"
INTERRUPTED = "interrupted; finished results are kept, and the same command measures the rest"


class LogHandler(LogHandlerBase):
    """Print points as they are measured, and Snakemake's messages about the run as a whole."""

    writes_to_stream = True
    writes_to_file = False
    has_filter = False
    has_formatter = False
    needs_rulegraph = False

    def __post_init__(self) -> None:
        """Start with nothing measured; RUN_INFO brings the number of jobs."""
        self.in_full = self.common_settings.dryrun or self.common_settings.verbose
        self.interrupted = False
        self.expected, self.began = 0, 0.0
        self.done: set[int] = set()  # jobs that finished or failed
        self.running: dict[int, tuple[str, Sequence[str]]] = {}  # name and outputs of each job
        self.logs: dict[str, tuple[int, int]] = {}  # stamps of the logs as earlier runs left them

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message or the progress line that replaces it; nothing after an interrupt."""
        if self.interrupted:
            return  # these are failed jobs, with their full commands and logs
        event, fields = getattr(record, "event", None), vars(record)
        if event == LogEvent.RUN_INFO:
            self.expected, self.began = fields["stats"]["total"], time.monotonic()
        as_it_is = self.in_full or event in SHOWN
        text = self.format(record) if as_it_is else self._progress(event, fields)
        if INTERRUPT in text and not self.in_full:
            text, self.interrupted = INTERRUPTED, True
        # Skip SHELL_FAILED, which repeats the whole command; the line of the job gives the reason.
        if text not in EMPTY and (self.in_full or not text.startswith(SHELL_FAILED)):
            print(text, file=sys.stderr, flush=True)

    def _progress(self, event: LogEvent | None, fields: dict[str, Any]) -> str:
        if event == LogEvent.JOB_INFO:
            # `size~small/context~128` reads as `size=small context=128`.
            point = (fields["wildcards"] or {}).get("point", "").replace("/", " ").replace("~", "=")
            name = f"{fields['rule_name']} {point}".strip()
            self.running[fields["jobid"]] = (name, fields["output"])
            self.logs |= {log: stamp(log) for log in fields["log"]}
        elif event == LogEvent.JOB_FINISHED:
            return self._finish(fields["job_id"])
        elif event == LogEvent.JOB_ERROR:
            self.done.add(fields["jobid"])
            name, _ = self.running.get(fields["jobid"], (fields["rule_name"], ()))
            return failure(name, fields) if self._broke(fields) else ""
        elif event == LogEvent.GROUP_ERROR:
            count, logs = len(fields["job_error_info"]), ", ".join(map(str, fields["aux_logs"]))
            see = f", see {logs}" if logs else ""  # there is none if it was never submitted
            return f"An allocation of {count} point{'s' * (count > 1)} failed{see}"
        return ""

    def _finish(self, job: int) -> str:
        """The line for a finished job: its name, its result, and what is left."""
        if job not in self.running:
            return ""
        name, outputs = self.running.pop(job)
        self.done.add(job)
        done, left = len(self.done), self.expected - len(self.done)
        seconds = (time.monotonic() - self.began) / done * left
        gave = f": {text}" if (text := outcome(outputs)) else ""
        rest = f"; {left} left, about {duration(seconds)}" if left > 0 else ""
        return f"[{done:>{len(str(self.expected))}}/{self.expected}] {name}{gave}{rest}"

    def _broke(self, job: dict[str, Any]) -> bool:
        """Whether this job really failed: all jobs of an allocation are reported as failed."""
        if not job["indent"]:
            return True
        began = any(stamp(log)[0] and stamp(log) != self.logs.get(str(log)) for log in job["log"])
        return began and not any(Path(output).exists() for output in job["output"])


def stamp(log: str) -> tuple[int, int]:
    """Size and mtime of a log, to tell whether a job wrote to it; zeros if there is none."""
    try:  # no check for existence: Snakemake removes old logs concurrently
        found = Path(log).stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def failure(name: str, job: dict[str, Any]) -> str:
    """The line for a failed job, with the last line of its log, which gives the reason."""
    logs = [Path(log) for log in (*job["log"], *(job.get("aux_logs") or ()))]
    for log in filter(Path.is_file, logs):
        if lines := log.read_text(errors="replace").strip().splitlines():
            return f"{name} failed: {lines[-1].strip()} (see {log})"
    return f"{name} failed"


def outcome(outputs: Sequence[str]) -> str:
    """The headline of a measured point and its failed variants; empty for other files."""
    for path in map(Path, outputs):
        if path.suffix == ".json" and path.is_file() and path.parts[0] == "results":
            try:
                result = read(path)
            except ResultError as error:
                return str(error)
            return ", ".join([result.headline(), *result.failed_variants()])
    return ""


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
