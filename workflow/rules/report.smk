# What people look at: tables, figures, the report, MLflow. All of it from the summary and the traces.


rule tables:
    input:
        summary=f"{RESULTS}/summary.json",
        sources=get_sources("harness/tables.py", "harness/report/answer.py"),
    output:
        csv=expand(f"{RESULTS}/tables/{{table}}.csv", table=TABLES),
        markdown=expand(f"{RESULTS}/tables/{{table}}.md", table=TABLES),
    log:
        f"{RESULTS}/logs/tables.log",
    conda:
        "../../environment.yml"
    params:
        results=lambda wildcards, input: Path(input.summary).parent,
    shell:
        "python -m harness.tables --results {params.results} 2>&1 | tee {log} >&2"


rule figures:
    input:
        summary=f"{RESULTS}/summary.json",
        traces=get_drawn_traces(),
        sources=get_sources(
            "harness/figures.py",
            "harness/tables.py",
            "harness/report/style.py",
            "harness/report/states.py",
        ),
    output:
        svg=expand(f"{RESULTS}/figures/{{figure}}.svg", figure=FIGURES),
        png=expand(f"{RESULTS}/figures/{{figure}}.png", figure=FIGURES),
        csv=expand(f"{RESULTS}/figures/{{figure}}.csv", figure=FIGURES),
    log:
        f"{RESULTS}/logs/figures.log",
    conda:
        "../../environment.yml"
    params:
        results=lambda wildcards, input: Path(input.summary).parent,
    shell:
        "python -m harness.figures --results {params.results} 2>&1 | tee {log} >&2"


rule report:
    input:
        summary=f"{RESULTS}/summary.json",
        tables=rules.tables.output.csv,
        figures=rules.figures.output.svg,
        sources=get_sources(
            "harness/report/*", "harness/figures.py", "harness/tables.py"
        ),
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        "../../environment.yml"
    params:
        results=lambda wildcards, input: Path(input.summary).parent,
    shell:
        "python -m harness.report --results {params.results} 2>&1 | tee {log} >&2"


rule publish:
    input:
        summary=f"{RESULTS}/summary.json",
        report=f"{RESULTS}/report.html",
        sources=get_sources("harness/tracking.py", "harness/published.py"),
    output:
        runs=f"{RESULTS}/mlflow_runs.csv",
    log:
        f"{RESULTS}/logs/publish.log",
    conda:
        "../../environment.yml"
    params:
        results=lambda wildcards, input: Path(input.summary).parent,
    shell:
        "python -m harness.tracking --results {params.results} --out {output.runs} 2>&1 | tee {log} >&2"


rule card:
    input:
        summary=f"{RESULTS}/summary.json",
        training=f"{RESULTS}/models/{{model}}/training.json",
        sources=get_sources("harness/card.py"),
    output:
        f"{RESULTS}/models/{{model}}/README.md",
    log:
        f"{RESULTS}/logs/card@{{model}}.log",
    wildcard_constraints:
        model="|".join(TRAINED) or "none",
    conda:
        "../../environment.yml"
    params:
        study=STUDY_NAME,
    shell:
        "python -m harness.card --study {params.study} --model {wildcards.model} 2>&1 | tee {log} >&2"
