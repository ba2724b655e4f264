"""The parts of the report, each a function from data to HTML. Whatever comes from data is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from harness.figures import all_figures
from harness.report.answer import answer
from harness.report.samples import sample_section
from harness.report.style import GRID, INK, PAPER, SOFT, as_svg
from harness.tables import AR, D2F, FACTORS, NOT_MEASURED, TABLES, for_people, is_main, origin, read_summary

HERE = Path(__file__).parent
HEADLINES = {  # (speed, quality); what is not listed has the same headline whatever the other half is
    (
        "faster",
        "equal",
    ): "Yes, in this study: {ratio:.2f} times as fast as autoregression, accuracy equal within {margin:g} points.",
    ("faster", "better"): "Yes, in this study: {ratio:.2f} times as fast as autoregression, and more accurate.",
    (
        "faster",
        "worse",
    ): "Faster, but less accurate: {ratio:.2f} times the speed of autoregression, {apart:+.1f} points of accuracy.",
    (
        "faster",
        "undecided",
    ): "Faster: {ratio:.2f} times the speed of autoregression. Whether it is as accurate stays open.",
    ("faster", "unknown"): "Faster: {ratio:.2f} times the speed of autoregression. Its accuracy was not compared.",
    "slower": "No, in this study: {ratio:.2f} times the speed of autoregression.",
    "undecided": "No speed difference to autoregression was found in this study.",
    "unknown": "This study did not measure it.",
}
WHAT = {
    "ar": "autoregression: one token per forward, with a cache",
    "ar-module": "the same through transformers' own forward",
    "vanilla": "LLaDA's sampler: one token per forward, all positions recomputed, stops at the end token",
    "vanilla-paper": "the same, but fills every position, as the paper's baseline does",
    "fast-dllm-prefix": "Fast-dLLM: approximate cache of the prefix, several tokens per forward",
    "fast-dllm-dual": "Fast-dLLM: approximate cache of prefix and suffix, several tokens per forward",
    "d2f": "D2F: blocks decoded in a pipeline, with an exact cache",
    "d2f-module": "the same through transformers' own forward",
    "d2f-one-token": "D2F held to one token per forward",
    "d2f-serial": "D2F block after block, without the pipeline",
}
CAPTIONS = {
    "throughput": "Speed of every system, with its ratio to AR and the accuracy of the same tokens.",
    "tradeoff": "Accuracy, with its interval, against speed: further up and to the right is better. The line varies D2F's "
    "confidence threshold τ, with τ written at its points.",
    "block-size": "Speed and accuracy of D2F over block sizes. Accuracy starts well above zero on its axis.",
    "trace": "How D2F decoded the first problem of the split: a row per forward, a column per position of the answer. "
    "Several blocks are worked on in one forward; a block is cached one forward after its last token.",
}


def paragraph(text: str, kind: str = "") -> str:
    """An escaped paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(headings: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(heading.strip("`"))}</th>' for heading in headings)
    body = ""
    for first, *cells in rows:
        line = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f"<tr>{line}</tr>\n"
    return f'<div class="wide" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def stored_table(summary: dict, name: str) -> str:
    """One of :mod:`harness.tables`."""
    frame = TABLES[name](summary)
    return table(*for_people(name, frame)) if len(frame) else paragraph(f"This study has no {name}.", "note")


def answer_section(summary: dict) -> str:
    """Headline and the two sentences behind it."""
    found = answer(summary)
    entry = summary["systems"].get(D2F) or {}
    values = {
        "ratio": (entry.get("ratio_to_ar") or [float("nan")])[0],
        "apart": 100 * (entry.get("versus_ar") or {}).get("difference", float("nan")),
        "margin": 100 * summary["statistics"]["margin"],
    }
    headline = (HEADLINES.get((found.speed, found.quality)) or HEADLINES[found.speed]).format(**values)
    return "\n".join([paragraph(headline, "headline"), paragraph(found.about_speed), paragraph(found.about_quality)])


def flags(summary: dict) -> str:
    """What a reader must know before believing any number here."""
    notes = []
    if summary["study"] == "smoke":
        notes.append("The study smoke only shows that everything runs; its scores mean nothing.")
    if summary["commit"].endswith("+"):
        notes.append("The sources differed from the named commit when the answers were generated.")
    if not isinstance(summary["study_digest"], str):
        notes.append("The results stem from several states of the study file; see the digests below.")
    limit = summary.get("max_new_tokens") or float("inf")
    full = [
        name
        for name, entry in summary["systems"].items()
        if is_main(entry) and (entry.get("length") or 0) > 0.9 * limit
    ]
    if full:
        notes.append(
            f"Answers run to the length limit on most problems: {', '.join(full)}. Their lengths and speeds say little."
        )
    return "\n".join(paragraph(note, "note") for note in notes)


def why_section(summary: dict) -> str:
    """The attribution of D2F's speed in a sentence."""
    entry = summary["systems"].get(D2F) or {}
    factors, ratio = entry.get("attribution_to_ar"), entry.get("ratio_to_ar")
    if not factors or not ratio or any(factors.get(key) is None for key in FACTORS):
        return escape(f"The attribution of {D2F}'s speed was {NOT_MEASURED}.")
    share, tokens, forwards = (factors[key] for key in FACTORS)
    cost = f"takes {1 / forwards:.2f} times as long" if forwards < 1 else f"takes {1 / forwards:.2f} of the time"
    return escape(
        f"A forward of {D2F} commits {tokens:.2f} times as many tokens as one of {AR} and {cost}; the useful share "
        f"of what it commits is {share:.2f} times that of {AR}. {tokens:.2f} × {forwards:.2f} × {share:.2f} = {tokens * forwards * share:.2f}."
    )


def module_note(summary: dict) -> str:
    """The same comparison without this suite's own forward."""
    speeds = [(summary["systems"].get(f"{name}-module") or {}).get("useful_tokens_per_second") for name in (D2F, AR)]
    if None in speeds:
        return ""
    return paragraph(
        f"Through transformers' own forward on both sides, which this suite did not write, {D2F} runs at "
        f"{speeds[0] / speeds[1]:.2f} times the speed of {AR} ({speeds[0]:,.0f} against {speeds[1]:,.0f} useful tokens per second)."
    )


def described(summary: dict) -> str:
    """What each main system is."""
    rows = []
    for name, entry in summary["systems"].items():
        if is_main(entry):
            settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in (entry.get("settings") or {}).items())
            how = f"{entry.get('decoder')} on {entry.get('model')}, {entry.get('forward')} forward"
            rows.append([name, WHAT.get(name, ""), how, settings or "defaults"])
    return table(["System", "What", "Decoder and model", "Settings (others: defaults)"], rows, "words many")


def inline_svg(svg: str, name: str, alt: str) -> str:
    """An SVG file as an element of the page: ids of its own, colours of the page, a text for who cannot see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for tone, variable in ((INK, "ink"), (SOFT, "soft"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(tone, f"var(--{variable})")
    head = re.sub(r' (width|height|version)="[^"]*"', "", svg[: svg.index(">")])
    return f'{head} role="img" aria-label="{escape(alt)}"{svg[svg.index(">") :]}'


def alt_text(name: str, frame) -> str:
    """The data of a figure as a sentence."""
    if name == "trace":
        steps = int(frame["step"].max()) if len(frame) else 0
        return f"Picture of one decode in {steps} steps. {CAPTIONS[name]}" if steps else "No trace to draw."
    first = "block_size" if name == "block-size" else "system"
    rows = [
        f"{row[first]}: {row['useful_tokens_per_second']:,.0f} tokens per second, {row['accuracy']:.1%} right"
        for row in frame.dropna(subset=["useful_tokens_per_second", "accuracy"]).to_dict("records")
    ]
    return f"{CAPTIONS[name]} " + ("; ".join(rows) or "No data.")


def figures_section(summary: dict, results: Path) -> str:
    """All figures with captions."""
    parts = []
    for name, (frame, drawn) in all_figures(summary, results).items():
        svg = inline_svg(as_svg(drawn), name, alt_text(name, frame))
        kind = "broad" if name == "trace" else ""
        caption = f"<figcaption>{escape(CAPTIONS[name])}</figcaption>"
        parts.append(
            f'<figure class="{kind}" id="figure-{name}"><div class="wide" tabindex="0">{svg}</div>\n{caption}</figure>'
        )
    return "\n".join(parts)


def limits_section(summary: dict) -> str:
    """What was not measured, as far as the data tell."""
    sizes = [model["parameters"] for model in (summary.get("models") or {}).values() if model.get("parameters")]
    points = []
    if sizes and max(sizes) < 1e9:
        points.append(
            f"No 7B or 8B model, as in the paper: the largest here has {max(sizes):,} parameters and knows one kind of "
            "problem. Published numbers can neither be reproduced nor contradicted at this size; only trends can be compared."
        )
    if summary["machine"].get("device") == "cpu":
        points.append(
            "No GPU. On a GPU a forward over many positions can cost little more than one over a single position, which "
            "would favour diffusion; on a CPU it costs more. Nothing here says where the balance lies on a GPU."
        )
    points.append("Batch 1 only: a server that answers many requests at once has another bottleneck.")
    points.append(
        f"One task ({summary.get('task', 'unknown')}), one training of each model: differences between trainings are not in the intervals."
    )
    return "<ul>\n" + "".join(f"<li>{escape(point)}</li>\n" for point in points) + "</ul>"


def provenance_section(summary: dict) -> str:
    """Commit, study, machine, models, seconds."""
    rows = [[key.replace("_", " "), str(value)] for key, value in origin(summary).items()]
    rows += [[str(key), str(value)] for key, value in summary["machine"].items()]
    for name, model in (summary.get("models") or {}).items():
        score = NOT_MEASURED if model.get("accuracy") is None else f"{model['accuracy']:.1%} right"
        rows.append(
            [f"model {name}", f"{model.get('parameters', 0):,} parameters; {score} on {model.get('problems')} problems"]
        )
    for rule, seconds in (summary.get("seconds") or {}).items():
        rows.append([f"seconds, {rule}", f"{seconds:,.1f}"])
    return table(["What", "Value"], rows, "words")


def page(results: Path) -> str:
    """The whole page."""
    summary = read_summary(results)
    rules = summary["statistics"]
    values = {
        "title": escape(f"D2F against autoregression: study {summary['study']}"),
        "style": (HERE / "style.css").read_text(),
        "kicker": escape(
            f"Study {summary['study']}, task {summary.get('task', 'unknown')}, {summary['machine'].get('cpu', 'unknown CPU')}"
        ),
        "answer": answer_section(summary),
        "flags": flags(summary),
        "why": why_section(summary),
        "module": module_note(summary),
        "described": described(summary),
        "figures": figures_section(summary, results),
        "sample": sample_section(summary, results),
        "limits": limits_section(summary),
        "provenance": provenance_section(summary),
        "confidence": escape(f"{rules['confidence']:.0%}"),
        "margin": escape(f"{100 * rules['margin']:g}"),
        "split": escape(str(summary.get("split", "unknown"))),
        "max_new_tokens": escape(str(summary.get("max_new_tokens", "unknown"))),
        **{name: stored_table(summary, name) for name in TABLES},
    }
    return Template((HERE / "page.html").read_text()).substitute(values)
