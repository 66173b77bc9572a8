"""The machine card: what the machine is, and the ceilings it reaches."""


rule machine:
    output:
        ensure(f"{RESULTS}/{{machine}}/machine.json", non_empty=True),
    log:
        "logs/{machine}/machine.log",
    params:
        point=point_json,
        made_with=made_with,
    resources:
        gpu=1,
    shell:
        MEASURE
