"""LM Lab: from config.yaml to a measured report/writeup.md.

    snakemake --cores 1 --resources gpu=1 report/writeup.md

One rule per chapter of the study, by kind of job; rules/common.smk has what they share.
"""

from pathlib import Path

from snakemake.utils import min_version

min_version("9.10")


PROJECT = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))


# A study in a folder of its own (--directory) may bring its own config.yaml.
configfile: "config.yaml" if Path("config.yaml").exists() else f"{PROJECT}/config.yaml"


include: "rules/common.smk"
include: "rules/measure.smk"
include: "rules/profile.smk"
include: "rules/ranks.smk"
include: "rules/report.smk"
include: "rules/compare.smk"


localrules:
    all,
    report,
    explore,
    compare,


rule all:
    default_target: True
    input:
        rules.report.output.page,
