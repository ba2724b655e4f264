"""The report answers first, stands alone, escapes what it shows, and says what it lacks."""

import re
from html.parser import HTMLParser

import pytest

from harness.report import build, main
from harness.report.sections import answer_section, flags
from tests.test_figures import make_record, store_traces
from tests.test_tables import UNMEASURED, make_summary, store

EVIL = "<script>alert('x')</script> & \"more\""
VOID = {"meta", "link", "br", "img", "hr"}


@pytest.fixture
def results(tmp_path):
    store(make_summary(), tmp_path)
    store_traces(tmp_path, "ar", make_record(0), make_record(1, text="one two five", correct=False))
    store_traces(tmp_path, "d2f", make_record(0), make_record(1))
    return tmp_path


class Page(HTMLParser):
    """Checks that tags match; collects ids, references and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.ids, self.wanted, self.words, self.labels = [], [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.labels += [values["aria-label"]] if "aria-label" in values else []
        for value in values.values():
            self.wanted += re.findall(r"url\(#([^)]+)\)", value or "")
        for key in ("href", "xlink:href", "src"):
            if key in values:
                assert values[key].startswith("#") or values[key] == "data:,", values[key]
                self.wanted += [values[key][1:]] if values[key].startswith("#") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_whole_and_stands_alone(results):
    html = build(results)
    page = Page(html)
    assert len(page.ids) == len(set(page.ids)), "inline figures share an id"
    assert set(page.wanted) <= set(page.ids)
    assert html.count("<svg ") == 4 == len(page.labels)
    assert not re.search(r"@import|<script|\bsrc=|url\((?!#)", html)
    assert "prefers-color-scheme: dark" in html and "@media print" in html and "width=device-width" in html


def test_the_answer_comes_first(results):
    text = Page(build(results)).text
    headline = "Yes, in this study: 1.84 times as fast as autoregression, accuracy equal within 2 points."
    assert headline in text
    assert text.index(headline) < text.index("Why") < text.index("All systems") < text.index("Figures")
    assert "commits 4.00 times as many tokens" in text and "c0ffee" in text and "512.3" in text
    assert "871,000 parameters" in text and "No GPU" in text


@pytest.mark.parametrize(
    ("d2f", "headline"),
    [
        ({"difference": -0.01, "reach": 0.03}, "Whether it is as accurate stays open."),
        (
            {"difference": -0.08, "p_value": 0.001},
            "Faster, but less accurate: 1.84 times the speed of autoregression, -8.0 points",
        ),
        ({"speed": 700}, "No, in this study: 0.70 times the speed"),
        ({"speed": 1000}, "No speed difference to autoregression was found"),
        (UNMEASURED, "This study did not measure it."),
    ],
)
def test_headlines(d2f, headline):
    assert headline in Page(answer_section(make_summary(**d2f))).text


def test_rebuilding_gives_the_same_bytes(results):
    main(["--results", str(results)])
    first = (results / "report.html").read_bytes()
    main(["--results", str(results)])
    assert (results / "report.html").read_bytes() == first


def test_samples_are_the_first_and_the_first_in_dispute(results):
    text = Page(build(results)).text
    assert "The first problem Question." in text
    assert "The first problem that some systems get right and others wrong" in text
    assert "ar (4 forwards), d2f (4 forwards): right" in text and "ar (4 forwards): wrong" in text


def test_whatever_comes_from_data_is_escaped(tmp_path):
    summary = make_summary()
    summary.update(study=EVIL, task=EVIL, commit=EVIL, split=EVIL, study_digest=[EVIL, EVIL])
    summary["machine"]["cpu"] = EVIL
    summary["models"][EVIL] = {"accuracy": None, "problems": 3, "parameters": 5}
    summary["seconds"][EVIL] = 1.0
    summary["systems"][EVIL] = {**summary["systems"]["d2f"], "settings": {EVIL: EVIL}, "decoder": EVIL, "model": EVIL}
    store(summary, tmp_path)
    store_traces(tmp_path, "d2f", make_record(question=EVIL, text=EVIL, target=EVIL))
    html = build(tmp_path)
    assert "<script" not in html
    assert EVIL in " ".join(Page(html).words)


def test_missing_pieces_are_said(tmp_path):
    summary = make_summary()
    summary["systems"] = {"ar": summary["systems"]["ar"]}
    store(summary, tmp_path)
    text = Page(build(tmp_path)).text
    assert "This study has no system 'd2f'." in text and "This study has no sweeps." in text
    assert "no stored answers" in text and "was not measured" in text


def test_doubts_are_shown_up_front():
    summary = make_summary(length=127.0)
    summary["commit"] += "+"
    text = Page(flags(summary)).text
    assert "sources differed from the named commit" in text and "length limit on most problems: d2f" in text


def test_broken_summaries_are_one_line(tmp_path):
    (tmp_path / "summary.json").write_text('{"schema": "d2f-suite/summary", "ver')
    with pytest.raises(ValueError, match="cut off"):
        build(tmp_path)
