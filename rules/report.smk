"""From results to the report: front page, chapters, index and figures, in one job."""


rule report:
    input:
        results=report_inputs,
        templates=files_of(TEMPLATES),
        references=files_of(REFERENCES),
    output:
        page=report(PAGES[0], category="study"),
        index=PAGES[1],
        chapters=[report(page, category=Path(page).stem) for page in PAGES[2:]],
        figures=report(
            directory(f"{REPORT}/figures"), patterns=["{chapter}/{name}.png"], category="{chapter}"
        ),
    log:
        f"logs/{REPORT}/report.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    params:
        script=script("report.py"),
        study=report_arguments,
        made_with=report_fingerprint("lmlab.cli.report", STUDY.chapters),
        out=lambda wildcards, output: os.path.dirname(output.page),
    shell:
        "{params.script} {params.study} --out {params.out:q} > {log:q} 2>&1"


use rule report as explore with:
    output:
        report(f"{REPORT}/explore.html", category="study"),
    log:
        f"logs/{REPORT}/explore.log",
    params:
        out=lambda wildcards, output: output[0],
