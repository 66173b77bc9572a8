"""Data parallelism: every variant on the same ranks, one world a job."""


rule data_parallel:
    output:
        ensure(f"{RESULTS}/{{machine}}/data_parallel/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/data_parallel/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=gpus_of("data_parallel"),
    params:
        script=script("ranks.py"),
        torchrun=torchrun("data_parallel"),
        on_each_node=on_each_node,
        point=point_json("data_parallel"),
        made_with=made_with("data_parallel"),
    shell:
        RANKS
