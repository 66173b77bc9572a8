"""Where the memory goes: one size, context and precision a job."""


rule memory:
    output:
        ensure(f"{RESULTS}/{{machine}}/memory/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/memory/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("memory"),
        made_with=made_with("memory"),
    shell:
        MEASURE
