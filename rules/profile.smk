"""Profiles: one point per job, recorded by nsys or by torch's profiler.

nsys wraps the process that it records, so this rule's shell command runs a plain process under it
(nsys does not follow the fork of a warm start), then exports its report, from which the result is
completed; the report is kept for the user to open. If nsys fails, the log says so in one line, and
with `profiler: auto` torch's profiler takes over.

Points with several ranks are recorded on request, with nsys around torchrun; times taken that way
stay out of the results: `snakemake traces/MACHINE/data_parallel/POINT.nsys`.
"""

if "profile" in PATHS:
    NSYS, WITHOUT_NSYS = nsys_for(STUDY.chapters["profile"])
    if WITHOUT_NSYS and not workflow.remote_exec:
        print(f"profile: {WITHOUT_NSYS}; torch's profiler records instead", file=sys.stderr)

    NSYS_OPTIONS = STUDY.chapters["profile"]["nsys_options"]
    WITH_TORCH = (
        f"env {NSYS_UNAVAILABLE}={{params.trouble:q}} {{params.script}} "
        "--point {params.point:q} --machine {wildcards.machine} --out {output.result:q}"
    )
    WITH_NSYS = (
        "work=$(mktemp -d) && trap 'rm -rf \"$work\"' EXIT && "
        f"( env {UNDER_NSYS}=1 "
        "{params.nsys} profile {params.profile_options} --output={output.trace:q}/report "
        "{params.program} --point {params.point:q} --machine {wildcards.machine} "
        '--out "$work/measured.json" && '
        # A point that ran out of memory has a result but no report.
        '( {params.nsys} export --type=sqlite --force-overwrite=true --output="$work/report.sqlite" '
        "{output.trace:q}/report.nsys-rep || true ) && "
        '{params.complete} --measured "$work/measured.json" --export "$work/report.sqlite" '
        "--out {output.result:q} ) || "
        '( echo "profile: "{params.trouble:q} >&2 && [ {params.profiler} = auto ] && '
        f"{WITH_TORCH} )"
    )

    rule profile:
        output:
            result=ensure(result_of("profile"), non_empty=True),
            # What the profiler wrote: nsys's report always, torch's trace with keep_traces.
            trace=directory("traces/{machine}/profile/{point}.trace"),
        log:
            log_of("profile"),
        conda:
            "../workflow/envs/lmlab.yaml"
        resources:
            gpu=1,
        params:
            script=script("measure.py"),
            complete=script("nsys_result.py"),
            program=unrecorded(sys.executable, "-m", "lmlab.jobs.run"),
            nsys=unrecorded(NSYS.path if NSYS else "nsys"),
            profile_options=unrecorded(*profile_options(NSYS_OPTIONS)),
            profiler=unrecorded(STUDY.chapters["profile"]["profiler"]),
            trouble=lambda wildcards, output: (
                f"nsys {NSYS.version} failed, see the log" if NSYS else WITHOUT_NSYS
            ),
            ignore_budget=ignore_budget("profile"),
            point=point_json("profile"),
            made_with=made_with("profile"),
        shell:
            "{params.ignore_budget}mkdir -p {output.trace:q} && "
            f"( {WITH_NSYS if NSYS else WITH_TORCH} ) > {{log:q}} 2>&1"

    for chapter in PATHS if NSYS else []:
        if not has_ranks(POINTS[PATHS[chapter][0]]):
            continue

        rule:
            name:
                f"{chapter}_nsys"
            output:
                directory(f"traces/{{machine}}/{stem_of(chapter)}.nsys"),
            log:
                f"logs/{{machine}}/{stem_of(chapter)}.nsys.log",
            resources:
                gpu=gpus_of(chapter),
            params:
                script=script("ranks.py"),
                nsys=unrecorded(NSYS.path),
                options=unrecorded(*profile_options(NSYS_OPTIONS, marked=False)),
                torchrun=torchrun(chapter),
                point=point_json(chapter),
            shell:
                "mkdir -p {output:q} && {params.script} --point {params.point:q} "
                "--machine {wildcards.machine} --out {output:q}/result.json "
                "-- {params.nsys} profile {params.options} --output={output:q}/report "
                "torchrun {params.torchrun} -m lmlab.jobs.ranks "
                "--point {params.point:q} --out {output:q}/result.json > {log:q} 2>&1"
