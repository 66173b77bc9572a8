"""Which kernels a step is made of: one point a job, recorded by nsys or by torch's profiler.

nsys records from outside, so it is this rule's shell that starts it, around a plain process of its
own (it does not follow the fork of a warm start); then it exports its report, and the result is
completed from that. The report stays, for a user to open. Whatever goes wrong with nsys is one line
in the log, and under `profiler: auto` torch's profiler takes over.
"""


include: "nsys.smk"


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
    # A point that ran out of memory has no report, and a result all the same.
    '( {params.nsys} export {params.export_options} --output="$work/report.sqlite" '
    "{output.trace:q}/report{params.suffix} || true ) && "
    '{params.complete} --measured "$work/measured.json" --export "$work/report.sqlite" '
    "--out {output.result:q} ) || "
    '( echo "profile: "{params.trouble:q} >&2 && [ {params.profiler} = auto ] && '
    f"{WITH_TORCH} )"
)


rule profile:
    output:
        result=ensure(f"{RESULTS}/{{machine}}/profile/{{point}}.json", non_empty=True),
        # What the profiler itself wrote: nsys's report always, torch's trace if keep_traces asks.
        trace=directory("traces/{machine}/profile/{point}.trace"),
    log:
        "logs/{machine}/profile/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        complete=script("nsys_result.py"),
        program=derived(sys.executable, "-m", "lmlab.jobs.run"),
        nsys=derived(NSYS.path if NSYS else "nsys"),
        profile_options=derived(*(NSYS.profile_options() if NSYS else [])),
        export_options=derived(*(NSYS.export_options() if NSYS else [])),
        suffix=derived(NSYS.report_suffix if NSYS else ""),
        profiler=derived(PROFILE["profiler"] if PROFILE else ""),
        trouble=lambda wildcards, output: TROUBLE_LINE,
        point=point_json("profile"),
        made_with=made_with("profile"),
    shell:
        "mkdir -p {output.trace:q} && " f"( {WITH_NSYS if NSYS else WITH_TORCH} ) > {{log:q}} 2>&1"
