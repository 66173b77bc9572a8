"""LM Lab: from config.yaml to a measured report/writeup.md.

    snakemake --cores 1 --resources gpu=1 report/writeup.md

One rule file a chapter; rules/common.smk has what they share.
"""

from pathlib import Path

from snakemake.utils import min_version

min_version("9.10")


HOME = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))


# A study in a folder of its own (--directory) may bring its own config.yaml.
configfile: "config.yaml" if Path("config.yaml").exists() else f"{HOME}/config.yaml"


include: "rules/common.smk"
include: "rules/machine.smk"
include: "rules/end_to_end.smk"
include: "rules/profile.smk"
include: "rules/memory.smk"
include: "rules/precision.smk"
include: "rules/attention.smk"
include: "rules/collectives.smk"
include: "rules/data_parallel.smk"
include: "rules/sharded_optimizer.smk"
include: "rules/fsdp.smk"
include: "rules/calculations.smk"
include: "rules/writeup.smk"


localrules:
    all,
    chapter,
    writeup,


rule all:
    default_target: True
    input:
        f"{REPORT}/writeup.md",
