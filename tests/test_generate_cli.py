"""``python -m d2f.generate``: what it prints, what it refuses, and the picture it draws."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest

from backbone.cli import Parser, one_line, run
from backbone.examples import encode, unknown_words
from backbone.pretraining import Shape, new_model
from backbone.trace import DONE, FULL, SEMI
from d2f import watch
from d2f.generate import MODEL, main
from d2f.watch import Cell, Watcher, cells, shown_blocks, width_of, wrap
from harness.tasks.tokenizer import make_tokenizer
from tests.test_imports import ROOT

PROMPT = "mia has 9 books . how many books does mia have now ?"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A model folder as a study leaves it, with a tiny random model."""
    module = new_model(Shape(16, layers=1, heads=2, kv_heads=2, intermediate_size=16, positions=96), tokenizer, 1)
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    network = {"mask_id": tokenizer.mask_token_id, "end_ids": [tokenizer.eos_token_id], "shift": False}
    (tmp_path / "network.json").write_text(json.dumps(network))
    (tmp_path / "decoding.json").write_text(
        json.dumps({"max_new_tokens": 24, "settings": {"block_size": 8, "tau_conf": 0.5}})
    )
    return tmp_path


def call(folder, *more: str) -> None:
    main(["--prompt", PROMPT, "--model", str(folder), *more])


def test_answer_and_summary(folder, capsys):
    call(folder)
    answer, summary = capsys.readouterr().out.splitlines()
    found = re.fullmatch(
        r"(\d+) tokens, (\d+) forwards, ([\d.]+) tokens per forward, ([\d.]+) s, ([\d.]+) tokens/s", summary
    )
    tokens, forwards = int(found[1]), int(found[2])
    assert 1 <= tokens <= 24 and float(found[3]) == pytest.approx(tokens / forwards, abs=0.006)
    assert len(answer.split()) in (tokens, tokens - 1)  # without or with its end token, which is not shown
    assert "<" not in answer


def test_command_line_overrides_the_folder(folder, capsys):
    call(folder, "--tau-conf", "1", "--tau-add", "1", "--max-new-tokens", "10", "--block-size", "5")
    found = re.match(r"(\d+) tokens, (\d+) forwards", capsys.readouterr().out.splitlines()[-1])
    assert found[1] == found[2]  # one token per forward
    call(folder, "--tau-conf", "0", "--tau-add", "1", "--max-new-tokens", "10", "--block-size", "10")
    assert "1 forwards" in capsys.readouterr().out


def test_without_decoding_json_the_defaults_hold(folder, capsys):
    (folder / "decoding.json").unlink()
    with pytest.raises(ValueError, match="need 142 positions"):  # 14 of the prompt and 128 of the answer
        call(folder)
    call(folder, "--max-new-tokens", "16")
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"max_new_tokens": 8}, "does not hold max_new_tokens and settings"),
        ([1], "does not hold"),
        ({"max_new_tokens": 8, "settings": {"tau": 1}}, "unknown key 'tau'; did you mean 'tau_add'"),
        ({"max_new_tokens": 8, "settings": {"block_size": "big"}}, "block_size is 'big'"),
        ({"max_new_tokens": 8, "settings": {"block_size": 8.5}}, "block_size is 8.5"),
        ({"max_new_tokens": 8, "settings": {"tau_conf": 1.5}}, "tau_conf is 1.5"),
        ({"max_new_tokens": 8, "settings": {"ragged_tail": "floor", "block_size": 9}}, "no room for one block of 9"),
    ],
)
def test_bad_stored_settings_are_refused(folder, stored, message):
    (folder / "decoding.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=message):
        call(folder)


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--tau-add", "2"], "tau_add is 2.0"), (["--block-size", "0"], "block_size is 0"),
     (["--max-new-tokens", "0"], "max_new_tokens is 0"), (["--max-new-tokens", "90"], "context has 96"),
     (["--prompt", "  "], "the prompt is empty")],
)  # fmt: skip
def test_bad_requests_are_refused(folder, more, message):
    with pytest.raises(ValueError, match=message):
        call(folder, *more)


@pytest.mark.parametrize(
    "more", [["--delay", "-1"], ["--delay", "inf"], ["--device", "tpu"], ["--block-size", "x"], ["--nonsense"]]
)
def test_bad_arguments_are_one_line(folder, more, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(folder, *more)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1


def test_a_missing_model_says_to_run_make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no model in {MODEL}: run `make` first"):
        main(["--prompt", PROMPT])


def test_damaged_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        call(folder)


def test_unknown_words_are_named_with_their_neighbours(tokenizer):
    assert encode(tokenizer, PROMPT) == tokenizer(PROMPT)["input_ids"]
    with pytest.raises(ValueError, match=r"lacks 'Mia' .nearest: mia.*, 'book' .nearest: books.*, 'qqqq':") as refused:
        encode(tokenizer, "Mia has 1 book . qqqq qqqq")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="and 2 more"):
        encode(tokenizer, "q1 q2 q3 q4 q5 q6 q7")
    # control: without the check the tokenizer reads them as the end token and says nothing
    assert tokenizer("qqqq")["input_ids"] == [tokenizer.eos_token_id]


def test_special_tokens_are_no_words(tokenizer):
    assert unknown_words(tokenizer, f"mia <mask> has {tokenizer.eos_token} 9") == ["<mask>", "<eos>"]


def test_a_tokenizer_that_spells_is_not_checked():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    engine = Tokenizer(
        models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = PreTrainedTokenizerFast(tokenizer_object=engine)
    assert unknown_words(letters, "anything at all") == []
    assert len(encode(letters, "any word")) == 8


ANSWER, LIVE = [5, 6, 7, 8, 9, 1, 1, 11, 1, 1], [(2, FULL), (3, SEMI)]


def test_blocks_in_front_of_the_live_ones_are_finished():
    assert shown_blocks(ANSWER, LIVE, 4) == [(DONE, [5, 6, 7, 8]), (FULL, [9, 1, 1, 11]), (SEMI, [1, 1])]
    assert shown_blocks(ANSWER, [(1, FULL)], 4) == [(FULL, [5, 6, 7, 8])]


def test_cells_are_coloured_by_state():
    words = cells(shown_blocks(ANSWER, LIVE, 4), 1, str)
    assert " ".join(cell.text for cell in words) == "5 6 7 8 | 9 · · 11 | · ·"
    styles = {cell.text: cell.style for cell in words[:-2]}
    assert (styles["5"], styles["9"]) == (watch.COLOURS[DONE], watch.COLOURS[FULL])
    assert styles["·"] == styles["|"] == watch.DIM
    assert words[-1].style.endswith(watch.COLOURS[SEMI])


@pytest.mark.parametrize("width", [1, 2, 7, 20, 200])
def test_wrapping_keeps_every_word_and_the_width(width):
    words = [Cell(text) for text in ["a", "bb", "ccc", "|", "漢字", "dddd", "·", "e"]]
    lines = wrap(words, width)
    assert all(width_of(" ".join(cell.text for cell in line)) <= width for line in lines)
    kept = [cell.text for line in lines for cell in line]
    assert len(kept) == len(words) and all(word.text.startswith(text) for text, word in zip(kept, words, strict=True))
    if width >= 4:
        assert kept == [word.text for word in words]


class Terminal(io.TextIOWrapper):
    """Pretends to be a terminal; ``screen`` plays the control sequences that the picture uses."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode()

    def screen(self) -> list[str]:
        lines = [""]
        for part in re.split(r"(\x1b\[\d+F\x1b\[J|\n)", self.text):
            if part == "\n":
                lines.append("")
            elif back := re.match(r"\x1b\[(\d+)F", part):
                del lines[len(lines) - 1 - int(back[1]) :]
                lines.append("")
            else:
                lines[-1] += ANSI.sub("", part)
        return lines


def draw(monkeypatch, tokenizer, columns: int = 40, rows: int = 24, steps: int = 3) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watch.shutil, "get_terminal_size", lambda: os.terminal_size((columns, rows)))
    terminal = Terminal()
    watcher = Watcher(tokenizer, tokenizer.mask_token_id, 4, 0.0, terminal)
    for step in range(steps):
        watcher([50 + step] * 4 + [1] * 6, [(1, DONE), (2, FULL), (3, SEMI)])
    return terminal


def test_the_picture_is_drawn_over_the_last_one(monkeypatch, tokenizer):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = draw(monkeypatch, tokenizer).screen()
    assert sum("step" in line for line in screen) == 1 and "step 3:" in screen[0]
    body = " ".join(" ".join(screen).split())
    assert body.endswith("49 49 49 49 | · · · · | · ·")
    assert all(len(line) < 40 for line in screen)


def test_a_picture_taller_than_the_terminal_stays_inside(monkeypatch, tokenizer):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = draw(monkeypatch, tokenizer, columns=8, rows=4)
    assert [int(lines) for lines in re.findall(r"\x1b\[(\d+)F", terminal.text)] == [3, 3]
    assert len(terminal.screen()) == 4


def test_no_color_is_honoured(monkeypatch, tokenizer):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(r"\x1b\[3\d", draw(monkeypatch, tokenizer).text)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*m", draw(monkeypatch, tokenizer).text)


def test_plain_lines_when_there_is_no_terminal(folder, capsys):
    call(folder, "--watch")
    *steps, _, summary = capsys.readouterr().out.splitlines()
    forwards = int(re.search(r"(\d+) forwards", summary)[1])
    assert [line.split(":")[0] for line in steps] == [f"step {n}" for n in range(1, forwards + 1)]
    assert all("activated" in line and "\x1b" not in line for line in steps)
    assert "drawing slows it" in summary


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (FloatingPointError("the loss is nan"), 2, "error: the loss is nan\n"),
        (FileNotFoundError("nothing here"), 2, "error: nothing here\n"),
        (KeyboardInterrupt(), 130, "interrupted: run the same command again to go on\n"),
    ],
)
def test_errors_become_one_line_and_a_code(error, code, line, capsys):
    def fails(arguments):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(fails)
    assert stopped.value.code == code and capsys.readouterr().err == line


def test_defects_keep_their_traceback_and_success_is_zero():
    with pytest.raises(ZeroDivisionError):
        run(lambda arguments: 1 / 0)
    for returned, code in ((None, 0), (3, 3)):
        with pytest.raises(SystemExit) as stopped:
            run(lambda arguments, returned=returned: returned)
        assert stopped.value.code == code
    assert one_line(ValueError()) == "ValueError"
    assert isinstance(Parser(), Parser)


def test_a_closed_pipe_is_quiet():
    code = "from backbone.cli import run\nrun(lambda a: [print('line', n) for n in range(100000)] and None)"
    pipe = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pipe.stdout.readline() == b"line 0\n"
    pipe.stdout.close()
    assert pipe.stderr.read() == b""
    pipe.stderr.close()
    assert pipe.wait() == 141


def test_the_command_as_a_user_runs_it(tmp_path):
    command = [sys.executable, "-m", "d2f.generate", "--prompt", PROMPT, "--model", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: there is no model in") and done.stderr.count("\n") == 1
