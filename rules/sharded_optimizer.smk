"""Sharded optimizer state: memory and time, one world a job."""


rule sharded_optimizer:
    output:
        ensure(f"{RESULTS}/{{machine}}/sharded_optimizer/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/sharded_optimizer/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=gpus_of("sharded_optimizer"),
    params:
        script=script("ranks.py"),
        torchrun=torchrun("sharded_optimizer"),
        on_each_node=on_each_node,
        point=point_json("sharded_optimizer"),
        made_with=made_with("sharded_optimizer"),
    shell:
        RANKS
