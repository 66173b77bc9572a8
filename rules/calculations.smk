"""Memory, batches and messages on paper: one job, which touches no device."""


rule calculations:
    output:
        ensure(f"{RESULTS}/{{machine}}/calculations.json", non_empty=True),
    log:
        "logs/{machine}/calculations.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("calculations"),
        made_with=made_with("calculations"),
    shell:
        MEASURE
