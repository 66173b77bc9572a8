"""FSDP beside what shards less: memory, time and waits, one world a job."""


rule fsdp:
    output:
        ensure(f"{RESULTS}/{{machine}}/fsdp/{{point}}.json", non_empty=True),
    log:
        "logs/{machine}/fsdp/{point}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=gpus_of("fsdp"),
    params:
        script=script("ranks.py"),
        torchrun=torchrun("fsdp"),
        on_each_node=on_each_node,
        point=point_json("fsdp"),
        made_with=made_with("fsdp"),
    shell:
        RANKS
