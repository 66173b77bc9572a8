"""Who records the profiles: nsys where it is found, and the words that its version understands.

Whether there is one is asked where the jobs run: a cluster's job reads these files on its own node.
"""

from lmlab.measure.trace.nsys_command import (
    NSYS_UNAVAILABLE,
    UNDER_NSYS,
    NsysUnavailable,
    find_nsys,
)


def nsys_for(block):
    """The nsys that records this study's profiles, or None and the line that says why not."""
    asked = block["profiler"] if block else "torch"
    if not MEASURING or asked == "torch" or (asked == "auto" and SELECTION.device != "cuda"):
        return None, ""
    try:
        return find_nsys(), ""
    except NsysUnavailable as trouble:
        if asked == "nsys" and MACHINE == HERE.id:
            stop(f"config: profile.profiler = 'nsys', but {trouble}; allowed here: auto, torch")
        return None, str(trouble)


PROFILE = STUDY.chapters.get("profile")
NSYS, WITHOUT_NSYS = nsys_for(PROFILE)
if WITHOUT_NSYS and not workflow.remote_exec:
    print(f"profile: {WITHOUT_NSYS}; torch's profiler records instead", file=sys.stderr)


# Why torch's profiler records: nothing at hand, or what was at hand gave no result.
TROUBLE_LINE = f"nsys {NSYS.version} failed, the log has what it said" if NSYS else WITHOUT_NSYS


def derived(*words):
    """Words of a command that Snakemake leaves out of its records, as it does those of `script`."""
    command = shlex.join(words)
    return lambda wildcards, output: command
