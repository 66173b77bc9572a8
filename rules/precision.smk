"""What number formats keep and lose: one experiment a job."""


rule precision:
    output:
        ensure(f"{RESULTS}/{{machine}}/precision/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/precision/{point}.log",
    params:
        point=point_json,
        made_with=made_with,
    resources:
        gpu=1,
    shell:
        MEASURE
