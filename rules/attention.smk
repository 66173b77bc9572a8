"""Attention, from naive to our own kernels: one shape, or one model, a job."""


rule attention:
    output:
        ensure(f"{RESULTS}/{{machine}}/attention/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/attention/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("attention"),
        made_with=made_with("attention"),
    shell:
        MEASURE
