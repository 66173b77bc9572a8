"""The machine card: what the machine is, and the ceilings it reaches."""


rule machine:
    output:
        ensure(f"{RESULTS}/{{machine}}/machine.json", non_empty=True),
    log:
        "logs/{machine}/machine.log",
    priority: 1  # first, so that a machine that is not what it should be shows at once
    conda:
        "../workflow/envs/lmlab.yaml"
    resources:
        gpu=1,
    params:
        script=script("measure.py"),
        point=point_json("machine"),
        made_with=made_with("machine"),
        # The card carries the device's stated peaks: a new entry in their table is read anew.
        peaks=PEAKS.read_text(),
    shell:
        MEASURE
