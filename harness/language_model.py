"""The lm-eval adapter: decodes each request at batch 1, keeps the trace, and can go on where it was killed.

What was decoded so far lies in a file of JSON lines beside the declared outputs; its first line is a
fingerprint of everything that decides the tokens, so that another setting never continues it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lm_eval.api.model import LM

from backbone.network import Network
from backbone.progress import Progress
from harness.accounting import useful_length
from harness.memory import PeakMemory
from harness.systems import Decoder


class DecoderLM(LM):
    """lm-eval's view of a decoder.

    Args:
        decoder: decodes one prompt.
        network: for its end ids.
        tokenizer: of the model.
        max_new_tokens: most tokens of an answer.
        label: what the progress lines say.
        partial: file that keeps what was decoded so far.
        fingerprint: what must be the same for ``partial`` to be continued.
        warmup: requests decoded once beforehand and thrown away, so that no kept latency is a first call.
    """

    def __init__(
        self,
        decoder: Decoder,
        network: Network,
        tokenizer,
        max_new_tokens: int,
        label: str,
        partial: Path,
        fingerprint: str,
        warmup: int = 1,
    ) -> None:
        super().__init__()
        self.decoder, self.network, self.tokenizer = decoder, network, tokenizer
        self.max_new_tokens, self.label, self.warmup = max_new_tokens, label, warmup
        self.partial, self.fingerprint = partial, fingerprint
        self.peak_memory: int | None = None
        self.records: dict[int, dict] = {}

    def _resume(self) -> None:
        """Take over finished records of an interrupted run; a last line cut off in the middle is dropped."""
        lines = self.partial.read_text().splitlines() if self.partial.exists() else []
        kept = []
        if lines and lines[0] == self.fingerprint:
            for line in lines[1:]:
                try:
                    kept.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        self.records = {record["id"]: record for record in kept}
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        text = [self.fingerprint, *(json.dumps(record) for record in kept)]
        self.partial.write_text("".join(line + "\n" for line in text))

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer(text)["input_ids"], dtype=torch.long)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _decode(self, number: int, context: str, stops: list[str]) -> dict:
        trace = self.decoder.decode(self.encode(context), self.max_new_tokens)
        useful = useful_length(trace.tokens, self.network.end_ids, stops, self.tokenizer.decode)
        text = self.text(trace.tokens[:useful])
        for stop in stops:
            text = text.split(stop)[0]
        return {"id": number, "text": text, "useful": useful, "trace": trace.to_json()}

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The answers of lm-eval's requests, in order, cut at their stop strings."""
        self._resume()
        progress = Progress(self.label, len(requests), "problem", start=len(self.records))
        for request in requests[: self.warmup]:
            self.decoder.decode(self.encode(request.args[0]), self.max_new_tokens)
        memory = PeakMemory(self.network)
        with self.partial.open("a") as file:
            for done, request in enumerate(requests, 1):
                if request.doc_id not in self.records:
                    context, options = request.args
                    record = self._decode(request.doc_id, context, list(options.get("until", [])))
                    self.records[request.doc_id] = record
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                progress.at(done)
        progress.done()
        self.peak_memory = memory.bytes()
        return [self.records[request.doc_id]["text"] for request in requests]

    def loglikelihood(self, requests, **kwargs):
        raise ValueError("this suite scores generated answers only: use tasks with output_type generate_until")

    loglikelihood_rolling = loglikelihood
