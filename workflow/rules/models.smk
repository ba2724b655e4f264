# Problems and models: fetched, or trained here.


rule problems:
    input:
        get_sources("harness/tasks/*.py"),
    output:
        splits=[f"{RESULTS}/data/{split}.jsonl" for split in STUDY.task.counts],
        task=f"{RESULTS}/data/task.yaml",
    log:
        f"{RESULTS}/logs/problems.log",
    benchmark:
        f"{RESULTS}/benchmarks/problems.tsv"
    conda:
        "../../environment.yml"
    params:
        study=STUDY_NAME,
        key=get_key(STUDY.task, STUDY.split),
    shell:
        "python -m harness.tasks.prepare --study {params.study} 2>&1 | tee {log} >&2"


rule fetch:
    input:
        lambda wildcards: f"{STUDY.models[wildcards.model].source}/model.safetensors",
    output:
        weights=f"{RESULTS}/models/{{model}}/model.safetensors",
    log:
        f"{RESULTS}/logs/fetch@{{model}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/fetch@{{model}}.tsv"
    wildcard_constraints:
        model="|".join(FETCHED) or "none",
    conda:
        "../../environment.yml"
    params:
        study=STUDY_NAME,
        key=lambda wildcards: get_key(STUDY.models[wildcards.model]),
    shell:
        "python -m harness.fetch --study {params.study} --model {wildcards.model} 2>&1 | tee {log} >&2"


rule train:
    input:
        f"{RESULTS}/data/train.jsonl",
        get_start,
        get_sources(
            "backbone/diffusion.py",
            "backbone/examples.py",
            "backbone/muon.py",
            "backbone/pretraining.py",
            "backbone/training.py",
            "d2f/blocks.py",
            "d2f/distillation.py",
            "d2f/noise.py",
            "harness/train.py",
        ),
    output:
        weights=f"{RESULTS}/models/{{model}}/model.safetensors",
        record=f"{RESULTS}/models/{{model}}/training.json",
    log:
        f"{RESULTS}/logs/train@{{model}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train@{{model}}.tsv"
    wildcard_constraints:
        model="|".join(TRAINED) or "none",
    conda:
        "../../environment.yml"
    threads: WHOLE_MACHINE
    params:
        study=STUDY_NAME,
        key=lambda wildcards: get_key(STUDY.models[wildcards.model], STUDY.device),
    shell:
        "python -m harness.train --study {params.study} --model {wildcards.model} 2>&1 | tee {log} >&2"
