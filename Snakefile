# What runs, when. `snakemake --cores all` runs the study `laptop`; `--config study=smoke` another.
from snakemake.utils import min_version

min_version("9.0")


include: "workflow/rules/common.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        get_final_output(),


onsuccess:
    if Path(
        RESULTS, "summary.json"
    ).exists():  # not when only some targets were asked for
        shell("python -m harness.tables --results {RESULTS} --terminal >&2")


onerror:
    print(
        "\nStopped. What was done is kept: run the same command again to go on.",
        file=sys.stderr,
    )
