"""Machines side by side: `snakemake report/compare.md --config compare=nvidia-h200,nvidia-a100`."""

from lmlab.study.selection import compared

try:
    COMPARED = compared(config, Path(RESULTS))
except ValueError as error:
    stop(error)


rule compare:
    input:
        results=lambda wildcards: [
            path for machine in COMPARED for path in files_of(Path(RESULTS, machine))
        ],
        templates=files_of(TEMPLATES),
        references=files_of(REFERENCES),
    output:
        page=report(f"{REPORT}/compare.md", category="study"),
        figures=report(directory(f"{REPORT}/compare"), patterns=["{name}.png"], category="compare"),
    log:
        f"logs/{REPORT}/compare.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    params:
        script=script("compare.py"),
        study=shlex.join(["--config", json.dumps(config), "--machines", ",".join(COMPARED)]),
        made_with=report_fingerprint("lmlab.cli.machines", STUDY.chapters),
    shell:
        "{params.script} {params.study} --out {output.page:q} > {log:q} 2>&1"
