"""Word problems: exact, seeded, disjoint. The number is checked twice, from the answer and from the question."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from harness.tasks.problems import SPLITS, Difficulty, Operation, problems, skeleton_split, tell, vocabulary
from harness.tasks.tokenizer import BAR, END, MASK, make_tokenizer

DIFFICULTIES = [
    Difficulty(),
    Difficulty(steps=(1, 2), operand_max=3, value_max=12, packs=0.0, distractions=0.0),
    Difficulty(steps=(3, 8), operand_max=20, value_max=99, packs=1.0, distractions=1.0),
]
EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
DO = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def some(split: str = "train", count: int = 300, seed: int = 1, difficulty: Difficulty = DIFFICULTIES[0]) -> list[dict]:
    return list(itertools.islice(problems(split, seed, difficulty), count))


def solve(question: str) -> int:
    """The answer by reading the question alone: an independent little parser of its sentences."""
    *story, asked = question.split(" . ")
    x = re.search(r"does (\w+) have|for (\w+) at|of (\w+) now", asked)
    x = next(name for name in x.groups() if name)
    gains = [
        rf"{x} finds (\d+) more", rf"\w+ gives {x} (\d+)", rf"{x} buys (\d+)", rf"(\d+) \w+ arrive for {x} ",
        rf"{x} gets (\d+) bags with (\d+)", rf"(\d+) friends bring {x} (\d+)",
    ]  # fmt: skip
    losses = [
        rf"{x} gives (\d+) \w+ to", rf"{x} loses (\d+)", rf"{x} sells (\d+)", rf"(\d+) of the \w+ of {x} break",
        rf"{x} hands (\d+) \w+ to each of (\d+)", rf"{x} drops (\d+) boxes of (\d+)",
    ]  # fmt: skip
    value = int(re.fullmatch(rf"{x} (?:has|starts with|owns) (\d+) \w+(?: at first)?", story[0])[1])
    for sentence in story[1:]:
        for sign, patterns in ((1, gains), (-1, losses)):
            for pattern in patterns:
                if found := re.match(pattern, sentence):
                    product = 1
                    for number in found.groups():
                        product *= int(number)
                    value += sign * product
    return value


@pytest.mark.parametrize("difficulty", DIFFICULTIES, ids=str)
def test_every_equation_is_right_and_they_lead_to_the_final_number(difficulty):
    for problem in some(count=200, difficulty=difficulty):
        value = int(re.search(r"with (\d+)", problem["answer"])[1])
        equations = EQUATION.findall(problem["answer"])
        assert len(equations) == problem["answer"].count("=")  # none escapes the check
        product = None
        for left, sign, right, result in equations:
            assert DO[sign](int(left), int(right)) == int(result), problem
            if sign == "*":
                product = int(result)
                continue
            assert int(left) == value and product in (None, int(right))
            value, product = int(result), None
            assert 1 <= value <= difficulty.value_max
        assert problem["answer"].endswith(f" #### {value}")
        assert problem["answer"].count("####") == 1


@pytest.mark.parametrize("difficulty", DIFFICULTIES, ids=str)
def test_the_question_alone_has_that_answer(difficulty):
    for problem in some(count=200, difficulty=difficulty):
        assert solve(problem["question"]) == int(problem["answer"].split("#### ")[1]), problem


def test_the_checks_notice_a_wrong_problem():
    operations = [Operation(3), Operation(-6, (2, 3))]
    question, answer = tell(random.Random(0), 10, operations, Difficulty(distractions=0.0))
    assert solve(question) == 7 and answer.endswith("#### 7")
    assert solve(question.replace(" 3 ", " 4 ", 1)) != 7
    broken = EQUATION.findall(answer.replace("= 7", "= 8"))
    assert any(DO[sign](int(a), int(b)) != int(c) for a, sign, b, c in broken)


def test_steps_packs_and_distractions_are_what_was_asked():
    for problem in some(count=100, difficulty=DIFFICULTIES[1]):
        assert 1 <= len(EQUATION.findall(problem["answer"])) <= 2 and "*" not in problem["answer"]
        assert problem["question"].count(" . ") == len(EQUATION.findall(problem["answer"])) + 1
    for problem in some(count=100, difficulty=DIFFICULTIES[2]):
        count = problem["answer"].count("*")
        assert 3 <= count <= 8 and len(EQUATION.findall(problem["answer"])) == 2 * count
        assert problem["question"].count(" . ") == 2 * count + 1  # a distraction before each operation


def skeleton(problem: dict) -> tuple:
    """Start value and equations: what two problems that are the same share."""
    return re.search(r"with (\d+)", problem["answer"])[1], tuple(EQUATION.findall(problem["answer"]))


def test_splits_are_disjoint_and_nothing_comes_twice():
    drawn = {split: some(split, 2500 if split == "train" else 400, difficulty=DIFFICULTIES[0]) for split in SPLITS}
    for view in (skeleton, lambda problem: problem["question"]):
        sets = {split: {view(problem) for problem in found} for split, found in drawn.items()}
        for split, found in drawn.items():
            assert len(sets[split]) == len(found)
        for first, second in itertools.combinations(SPLITS, 2):
            assert not sets[first] & sets[second]


def test_easy_skeletons_are_disjoint_too():
    """So few are possible that an undivided draw would surely share some (the control below)."""
    easy = DIFFICULTIES[1]
    train, test = some("train", 150, difficulty=easy), some("test", 12, difficulty=easy)
    assert not {skeleton(p) for p in train} & {skeleton(p) for p in test}
    again = some("train", 150, seed=2, difficulty=easy)
    assert {skeleton(p) for p in train} & {skeleton(p) for p in again}


def test_splits_cover_everything_once():
    assert sorted(percent for share in SPLITS.values() for percent in share) == list(range(100))
    assert skeleton_split(5, [Operation(3), Operation(-6, (2, 3))]) in SPLITS


def test_draws_are_seeded():
    assert some(count=50) == some(count=50)
    assert some(count=50)[:20] == some(count=20)
    assert some(count=50) != some(count=50, seed=2)


@pytest.mark.parametrize("difficulty", DIFFICULTIES, ids=str)
def test_every_word_is_in_the_vocabulary(difficulty):
    words, tokenizer = vocabulary(), make_tokenizer()
    assert len(words) == len(set(words)) and not {END, MASK, BAR} & set(words)
    assert len(tokenizer) == len(words) + 3
    for problem in some(count=200, difficulty=difficulty):
        text = f"{problem['question']} {BAR} {problem['answer']}"
        assert set(text.split()) <= {*words, BAR}
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) == len(text.split())


def test_a_difficulty_without_enough_problems_says_so():
    with pytest.raises(ValueError, match=r"has only .* different problems"):
        some("test", 1000, difficulty=Difficulty((1, 1), 1, 3, 0.0, 0.0))


@pytest.mark.parametrize(
    "wrong",
    [{"steps": (0, 3)}, {"steps": (4, 3)}, {"operand_max": 0}, {"value_max": 5}, {"value_max": 100}, {"packs": 1.1},
     {"packs": 1.0, "value_max": 7}, {"distractions": -0.1}, {"distractions": float("nan")}],
)  # fmt: skip
def test_bad_difficulties_are_refused_with_their_name(wrong):
    with pytest.raises(ValueError, match=f"difficulty.*{next(iter(wrong))}"):
        Difficulty(**wrong)
