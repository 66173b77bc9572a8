"""Forward, backward and optimizer times: one point a job."""


rule end_to_end:
    output:
        ensure(f"{RESULTS}/{{machine}}/end_to_end/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/end_to_end/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("end_to_end"),
        made_with=made_with("end_to_end"),
    shell:
        MEASURE
