# Every system on the task, then all of them side by side.


rule generate:
    input:
        f"{RESULTS}/data/task.yaml",
        f"{RESULTS}/data/{STUDY.split}.jsonl",
        get_weights,
        get_sources(
            "backbone/*.py",
            "baselines/*.py",
            "d2f/decoding.py",
            "d2f/blocks.py",
            "harness/accounting.py",
            "harness/generation.py",
            "harness/language_model.py",
            "harness/systems.py",
        ),
    output:
        result=f"{RESULTS}/generate/{{system}}.json",
        traces=f"{RESULTS}/generate/{{system}}.traces.jsonl",
    log:
        f"{RESULTS}/logs/generate@{{system}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/generate@{{system}}.tsv"
    conda:
        "../../environment.yml"
    params:
        study=STUDY_NAME,
        key=lambda wildcards: get_key(STUDY.systems[wildcards.system], get_decoding()),
    shell:
        "python -m harness.generation --study {params.study} --system {wildcards.system} 2>&1 | tee {log} >&2"


rule race:
    input:
        # after every generate: nothing else may run beside a race, and its tokens are checked against theirs
        expand(f"{RESULTS}/generate/{{system}}.json", system=STUDY.systems),
        get_sources("harness/race.py"),
    output:
        f"{RESULTS}/race.traces.jsonl",
    log:
        f"{RESULTS}/logs/race.log",
    benchmark:
        f"{RESULTS}/benchmarks/race.tsv"
    conda:
        "../../environment.yml"
    threads: WHOLE_MACHINE
    resources:
        gpu=1,
    params:
        study=STUDY_NAME,
        key=get_key(STUDY.systems, STUDY.race, get_decoding()),
    shell:
        "python -m harness.race --study {params.study} 2>&1 | tee {log} >&2"


rule summary:
    input:
        results=expand(f"{RESULTS}/generate/{{system}}.json", system=STUDY.systems),
        traces=expand(
            f"{RESULTS}/generate/{{system}}.traces.jsonl", system=STUDY.systems
        ),
        race=f"{RESULTS}/race.traces.jsonl",
        sources=get_sources(
            "harness/summary.py", "harness/accounting.py", "harness/statistics.py"
        ),
    output:
        f"{RESULTS}/summary.json",
    log:
        f"{RESULTS}/logs/summary.log",
    conda:
        "../../environment.yml"
    params:
        study=STUDY_NAME,
        key=get_key(STUDY.models, STUDY.statistics),
    shell:
        "python -m harness.summary --study {params.study} 2>&1 | tee {log} >&2"
