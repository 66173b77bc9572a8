"""Measurements in one process: one rule per chapter, one point per job."""

for chapter in PATHS:
    if chapter == "profile" or has_ranks(POINTS[PATHS[chapter][0]]):
        continue

    rule:
        name:
            chapter
        output:
            ensure(result_of(chapter), non_empty=True),
        log:
            log_of(chapter),
        # The machine card first, so that a misbehaving machine shows at once.
        priority: int(chapter == "machine")
        conda:
            "../workflow/envs/lmlab.yaml"
        resources:
            gpu=1,
        params:
            script=script("measure.py"),
            ignore_budget=ignore_budget(chapter),
            point=point_json(chapter),
            made_with=made_with(chapter),
        shell:
            "{params.ignore_budget}{params.script} --point {params.point:q} "
            "--machine {wildcards.machine} --out {output:q} > {log:q} 2>&1"
