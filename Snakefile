"""LM Lab: from config.yaml to a measured report/writeup.md.

    snakemake --cores 1 --resources gpu=1 report/writeup.md

One rule per chapter of the study, grouped by kind of job; rules/common.smk has what they share.
"""

import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.10")


PROJECT = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))


sys.path.insert(0, str(PROJECT / "src"))
from lmlab.study import config_file

# A study in a folder of its own (--directory) may bring its own config.yaml.
CONFIG = "config.yaml" if Path("config.yaml").exists() else f"{PROJECT}/config.yaml"
# Snakemake silently keeps the last of two duplicate keys, and ends in a traceback if it cannot read
# a file, so check our own files first.
if Path(workflow.main_snakefile).resolve().is_relative_to(PROJECT.resolve()):
    try:
        for file in (CONFIG, *workflow.configfiles):
            config_file.read(Path(file))
    except ValueError as error:
        sys.exit(str(error))


configfile: CONFIG


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
