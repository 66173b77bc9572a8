"""From results to the page: tables and figures a chapter, then the templates."""

CONFIG_JSON = json.dumps(config, sort_keys=True)


rule chapter:
    input:
        results=lambda wildcards: results_of(wildcards.chapter),
        card=results_of("machine"),
        references=lambda wildcards: sorted(map(str, REFERENCES.glob("*.csv"))),
    output:
        data=f"{REPORT}/chapters/{{chapter}}.json",
        figures=directory(f"{REPORT}/figures/{{chapter}}"),
    log:
        f"logs/{REPORT}/{{chapter}}.log",
    params:
        config=CONFIG_JSON,
        made_with=lambda wildcards: chapter_fingerprint(wildcards.chapter),
    shell:
        "{PYTHON} {SCRIPTS}/chapter.py --config {params.config:q} --chapter {wildcards.chapter} "
        "--machine {MACHINE} --device {SELECTION.device} --results {RESULTS} "
        "--figures {output.figures} --out {output.data} > {log} 2>&1"


rule writeup:
    input:
        chapters=[f"{REPORT}/chapters/{chapter}.json" for chapter in STUDY.chapters],
        templates=sorted(map(str, TEMPLATES.glob("*.md.j2"))),
    output:
        f"{REPORT}/writeup.md",
    log:
        f"logs/{REPORT}/writeup.log",
    params:
        made_with=page_fingerprint(),
    shell:
        "{PYTHON} {SCRIPTS}/writeup.py --chapters {input.chapters} --templates {TEMPLATES} "
        "--out {output} > {log} 2>&1"
