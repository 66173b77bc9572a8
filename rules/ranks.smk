"""Measurements with several processes: one rule per chapter, all ranks of a point in one job.

ranks.py runs the torchrun command after `--` as given and adds what torchrun lacks: one measurement
at a time, a deadline, and a result whatever happens.
"""

for chapter in PATHS:
    if not has_ranks(POINTS[PATHS[chapter][0]]):
        continue

    rule:
        name:
            chapter
        output:
            ensure(result_of(chapter), non_empty=True),
        log:
            log_of(chapter),
        conda:
            "../workflow/envs/lmlab.yaml"
        resources:
            gpu=gpus_of(chapter),
        params:
            script=script("ranks.py"),
            ignore_budget=ignore_budget(chapter),
            on_each_node=on_each_node,
            torchrun=torchrun(chapter),
            point=point_json(chapter),
            made_with=made_with(chapter),
        shell:
            "{params.ignore_budget}{params.on_each_node} {params.script} "
            "--point {params.point:q} --machine {wildcards.machine} --out {output:q} "
            "-- torchrun {params.torchrun} -m lmlab.jobs.ranks "
            "--point {params.point:q} --out {output:q} > {log:q} 2>&1"
