"""From results to the page: tables and figures a chapter, then the templates."""

CONFIG_JSON = json.dumps(config, sort_keys=True)
CHAPTERS = [f"{REPORT}/chapters/{chapter}.json" for chapter in GRIDS if chapter in STUDY.chapters]
FIGURES = [f"{REPORT}/figures/{chapter}" for chapter in GRIDS if chapter in STUDY.chapters]
PAGE = f"{REPORT}/writeup.md"


rule chapter:
    input:
        results=lambda wildcards: kept(
            results_of(wildcards.chapter), f"{REPORT}/chapters/{wildcards.chapter}.json"
        ),
        read=lambda wildcards: results_read_by(wildcards.chapter),
        card=results_of("machine"),
        references=files_of(REFERENCES, "*.csv"),
    output:
        data=f"{REPORT}/chapters/{{chapter}}.json",
        figures=directory(f"{REPORT}/figures/{{chapter}}"),
    log:
        f"logs/{REPORT}/{{chapter}}.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    params:
        script=script("chapter.py"),
        config=CONFIG_JSON,
        machine=MACHINE,
        device=SELECTION.device,
        made_with=lambda wildcards: chapter_fingerprint(wildcards.chapter),
    shell:
        "{params.script} --config {params.config:q} --chapter {wildcards.chapter} "
        "--machine {params.machine} --device {params.device} "
        "--figures {output.figures:q} --out {output.data:q} > {log:q} 2>&1"


rule writeup:
    input:
        chapters=lambda wildcards: kept(CHAPTERS, PAGE),
        figures=lambda wildcards: ancient(kept(FIGURES, PAGE)),
        templates=files_of(TEMPLATES, "*.md.j2"),
    output:
        PAGE,
    log:
        f"logs/{REPORT}/writeup.log",
    conda:
        "../workflow/envs/lmlab.yaml"
    params:
        script=script("writeup.py"),
        made_with=page_fingerprint(),
    shell:
        "{params.script} --chapters {input.chapters:q} --templates {input.templates:q} "
        "--out {output:q} > {log:q} 2>&1"
