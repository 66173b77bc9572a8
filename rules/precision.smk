"""What number formats keep and lose: one experiment a job."""


rule precision:
    output:
        ensure(f"{RESULTS}/{{machine}}/precision/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/precision/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("precision"),
        made_with=made_with("precision"),
    shell:
        MEASURE
