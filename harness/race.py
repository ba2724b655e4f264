"""Systems timed side by side: one process, the same prompts, A B C A B C, warm-up dropped, several rounds.

Ratios between systems come only from here, since everything that may disturb a clock (another job, a
warmer processor, a throttled core) meets all systems alike. The decodes are the very ones that
``generate`` scored; the summary refuses a race whose tokens differ.

``python -m harness.race --study laptop --results results/laptop``
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from backbone.cli import run
from backbone.examples import PROMPT_FORMAT
from backbone.progress import Progress
from backbone.trace import write_traces
from harness.accounting import useful_length
from harness.command import study_options
from harness.generation import load_system
from harness.provenance import provenance
from harness.study import Study
from harness.systems import make_decoder
from harness.train import load_tokenizer


def load_racers(study: Study, results: Path) -> dict[str, tuple]:
    """``name -> (decoder, tokenizer, network)``; systems with one model and forward share their network."""
    networks, racers = {}, {}
    for name, system in study.systems.items():
        key = (system.model, system.forward)
        if key not in networks:
            networks[key] = (load_system(study, system, results), load_tokenizer(results / "models" / system.model))
        network, tokenizer = networks[key]
        network.profile = network.device.type == "cpu"  # on a GPU it would add a wait to every step
        racers[name] = (make_decoder(system.decoder, system.settings, network), tokenizer, network)
    return racers


def race(study_name: str, study: Study, results: Path) -> None:
    """Run the race and write ``race.traces.jsonl``: one record per system, prompt and round."""
    torch.set_num_threads(study.threads)
    racers = load_racers(study, results)
    lines = (results / "data" / f"{study.split}.jsonl").read_text().splitlines()
    settings = study.race
    if settings.prompts > len(lines):
        raise ValueError(f"race.prompts is {settings.prompts}, but the {study.split} split has {len(lines)} problems")
    prompts = [PROMPT_FORMAT.format(question=json.loads(line)["question"]) for line in lines[: settings.prompts]]

    def decode(name: str, prompt: str):
        decoder, tokenizer, network = racers[name]
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        network.seconds = 0.0
        trace = decoder.decode(ids, study.task.max_new_tokens)
        useful = useful_length(trace.tokens, network.end_ids, [], tokenizer.decode)
        return {"useful": useful, "forward_seconds": network.seconds, "trace": trace.to_json()}

    for prompt in prompts[: settings.warmup]:
        for name in racers:
            decode(name, prompt)
    records = []
    progress = Progress("race", settings.rounds * len(prompts), "prompt")
    for turn in range(settings.rounds):
        for number, prompt in enumerate(prompts):
            for name in racers:
                records.append({"id": number, "system": name, "round": turn, **decode(name, prompt)})
            progress.at(turn * len(prompts) + number + 1, f"round {turn + 1} of {settings.rounds}")
    progress.done()
    write_traces(results / "race.traces.jsonl", records, **provenance(study_name, study))


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv)
    race(options.study, options.loaded, options.results)


if __name__ == "__main__":
    run(main)
