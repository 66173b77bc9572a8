"""Collectives: the ranks of one placement and world size a job."""


rule collectives:
    output:
        ensure(f"{RESULTS}/{{machine}}/collectives/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/collectives/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=gpus_of("collectives"),
    params:
        script=script("ranks.py"),
        on_each_node=on_each_node,
        torchrun=torchrun("collectives"),
        point=point_json("collectives"),
        made_with=made_with("collectives"),
    shell:
        RANKS
