"""Word problems with worked answers, in the manner of GSM8K, that small models can really learn.

A problem tells how the number of things that one person has changes, step by step; sentences about
other people's things stand in between and do not matter. The worked answer takes the steps in order,
says each in other words than the question did, does the sum, and ends with ``#### n``:

    mia has 9 books . leo buys 3 pens . mia gives 4 books to sam . ... how many books does mia have now ?
    mia starts with 9 books . sam takes 4 , so mia keeps 9 - 4 = 5 books . ... #### 5

Everything is exact and seeded. Each answer step has one word that is drawn freely from two synonyms
(a *fork*): without it the answer would be a function of the question, and a parallel decoder could
write it almost at once. Two problems are the same if they share their *skeleton* (start value and
operations, whatever the names and words); the skeleton's hash decides the split it belongs to, so
train, tune and test are disjoint by construction, however many of each are drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = ["mia", "leo", "sam", "ana", "tom", "zoe", "max", "eva"]
ITEMS = ["books", "pens", "shells", "coins", "cards", "stamps", "apples", "marbles"]

STARTS = ("{x} has {v} {i} .", "{x} starts with {v} {i} .", "{x} owns {v} {i} at first .")
START_ANSWERS = ("{x} {begins} with {v} {i} .",)
QUESTIONS = (
    "how many {i} does {x} have now ?",
    "how many {i} are left for {x} at the end ?",
    "what is the number of {i} of {x} now ?",
)
# (what the question says, how the answer retells it); {so} and the like are the forks
GAINS = (
    ("{x} finds {a} more {i} .", "{a} {i} are found , {so} {x} {now} has {v} + {a} = {w} {i} ."),
    ("{n} gives {x} {a} {i} .", "{x} gets {a} from {n} , which {makes} {v} + {a} = {w} {i} ."),
    ("{x} buys {a} {i} at the shop .", "with {a} bought , the number {rises} to {v} + {a} = {w} ."),
    ("{a} {i} arrive for {x} by mail .", "the mail brings {a} {i} and {x} {now} has {v} + {a} = {w} ."),
)
LOSSES = (
    ("{x} gives {a} {i} to {n} .", "{n} takes {a} , {so} {x} keeps {v} - {a} = {w} {i} ."),
    ("{x} loses {a} {i} on the way home .", "after losing {a} there {now} are {v} - {a} = {w} {i} ."),
    ("{x} sells {a} {i} .", "{a} {i} are sold and {v} - {a} = {w} {remain} ."),
    ("{a} of the {i} of {x} break .", "the broken ones are {a} , {so} the rest is {v} - {a} = {w} {i} ."),
)
PACK_GAINS = (
    (
        "{x} gets {m} bags with {b} {i} each .",
        "{m} bags of {b} are {m} * {b} = {a} , {so} {x} {now} has {v} + {a} = {w} .",
    ),
    (
        "{m} friends bring {x} {b} {i} each .",
        "{m} friends with {b} make {m} * {b} = {a} , which {makes} {v} + {a} = {w} {i} .",
    ),
)
PACK_LOSSES = (
    (
        "{x} hands {b} {i} to each of {m} friends .",
        "{m} friends take {b} each , {m} * {b} = {a} , {so} {v} - {a} = {w} {remain} .",
    ),
    ("{x} drops {m} boxes of {b} {i} .", "{m} boxes hold {m} * {b} = {a} , {so} {x} {now} has {v} - {a} = {w} ."),
)
DISTRACTIONS = (
    "{n} has {a} {j} .",
    "{n} finds {a} {j} in the park .",
    "{x} sees {a} {j} in a window .",
    "{n} gives {a} {j} to {k} .",
)
FORKS = {
    "begins": ("starts", "begins"),
    "so": ("so", "thus"),
    "now": ("now", "then"),
    "makes": ("makes", "gives"),
    "rises": ("rises", "climbs"),
    "remain": ("remain", "stay"),
}
SPLITS = {"train": range(0, 90), "tune": range(90, 95), "test": range(95, 100)}  # percent of skeletons


@dataclass(frozen=True)
class Difficulty:
    """What makes a problem hard; set in the study.

    Args:
        steps: fewest and most operations of a story.
        operand_max: largest number added or taken away in a plain operation.
        value_max: the running value stays within 1..value_max.
        packs: share of operations that multiply first ("3 bags with 4 each").
        distractions: chance of an irrelevant sentence before each operation.
    """

    steps: tuple[int, int] = (4, 6)
    operand_max: int = 5
    value_max: int = 30
    packs: float = 0.2
    distractions: float = 0.3

    def __post_init__(self) -> None:
        low, high = self.steps
        if not 1 <= low <= high:
            raise ValueError(f"difficulty.steps is [{low}, {high}]: give [fewest, most] with 1 <= fewest <= most")
        if not 1 <= self.operand_max < self.value_max <= 99:
            raise ValueError(
                f"difficulty: operand_max {self.operand_max} and value_max {self.value_max} must satisfy "
                "1 <= operand_max < value_max <= 99 (each number up to 99 is one token)"
            )
        for key in ("packs", "distractions"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"difficulty.{key} is {getattr(self, key)}: give a probability from 0 to 1")
        if self.packs == 1 and self.value_max < 8:  # the smallest pack is 2 * 2: from 4 it would fit nowhere
            raise ValueError(
                f"difficulty: with packs 1, value_max is {self.value_max}: give at least 8, or fewer packs"
            )


@dataclass(frozen=True)
class Operation:
    """One step of a story: ``delta`` is what it adds; ``pack`` its two factors if it multiplies."""

    delta: int
    pack: tuple[int, int] | None = None


def draw_operation(rng: random.Random, value: int, difficulty: Difficulty) -> Operation:
    """Draw an operation that keeps the running value within 1..value_max."""
    while True:
        pack = None
        size = rng.randint(1, difficulty.operand_max)
        if rng.random() < difficulty.packs:
            pack = (rng.randint(2, 4), rng.randint(2, 5))
            size = pack[0] * pack[1]
        delta = size if rng.random() < 0.5 else -size
        if 1 <= value + delta <= difficulty.value_max:
            return Operation(delta, pack)


def skeleton_split(start: int, operations: list[Operation]) -> str:
    """The split that a story belongs to, by a stable hash of its numbers."""
    text = f"{start} " + " ".join(f"{o.delta}{o.pack or ''}" for o in operations)
    percent = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    return next(name for name, share in SPLITS.items() if percent in share)


def tell(rng: random.Random, start: int, operations: list[Operation], difficulty: Difficulty) -> tuple[str, str]:
    """Put a skeleton into words: the question and its worked answer."""
    person, *others = rng.sample(NAMES, len(NAMES))
    item, *other_items = rng.sample(ITEMS, len(ITEMS))

    def words(template: str, **values: object) -> str:
        forks = {key: rng.choice(pair) for key, pair in FORKS.items()}
        first, second = rng.sample(others, 2)
        return template.format(
            x=person, i=item, **{"n": first, "k": second, "j": rng.choice(other_items), **forks, **values}
        )

    question = [words(rng.choice(STARTS), v=start)]
    answer = [words(rng.choice(START_ANSWERS), v=start)]
    value = start
    for operation in operations:
        if rng.random() < difficulty.distractions:
            question.append(words(rng.choice(DISTRACTIONS), a=rng.randint(1, difficulty.value_max)))
        gain, size = operation.delta > 0, abs(operation.delta)
        if operation.pack:
            said, retold = rng.choice(PACK_GAINS if gain else PACK_LOSSES)
            numbers = {"m": operation.pack[0], "b": operation.pack[1]}
        else:
            said, retold = rng.choice(GAINS if gain else LOSSES)
            numbers = {}
        facts = {"n": rng.choice(others), "a": size, "v": value, "w": value + operation.delta, **numbers}
        question.append(words(said, **facts))
        answer.append(words(retold, **facts))
        value += operation.delta
    question.append(words(rng.choice(QUESTIONS)))
    return " ".join(question), " ".join(answer) + f" #### {value}"


def problems(split: str, seed: int, difficulty: Difficulty) -> Iterator[dict[str, str]]:
    """Yield problems of ``split``, as ``{"question", "answer"}``; no skeleton comes twice.

    Raises:
        ValueError: the difficulty has no new skeleton any more (it did not draw one in 100,000 tries).
    """
    rng = random.Random(f"{seed}-{split}")
    seen, misses = set(), 0
    while misses < 100_000:
        misses += 1
        start = value = rng.randint(2, difficulty.value_max)
        operations = []
        for _ in range(rng.randint(*difficulty.steps)):
            operations.append(draw_operation(rng, value, difficulty))
            value += operations[-1].delta
        skeleton = (start, *operations)
        if skeleton in seen or skeleton_split(start, operations) != split:
            continue
        seen.add(skeleton)
        misses = 0
        question, answer = tell(rng, start, operations, difficulty)
        yield {"question": question, "answer": answer}
    raise ValueError(
        f"split {split!r} has only {len(seen)} different problems at this difficulty: ask for fewer, or raise steps or value_max"
    )


def vocabulary() -> list[str]:
    """Every word a problem can hold: the numbers 0-99, then the words of the templates, sorted."""
    templates = [*STARTS, *START_ANSWERS, *QUESTIONS, *DISTRACTIONS, "####"]
    for pairs in (GAINS, LOSSES, PACK_GAINS, PACK_LOSSES):
        templates += [text for pair in pairs for text in pair]
    words = {w for text in templates for w in text.split() if not w.startswith("{")}
    words |= {w for pair in FORKS.values() for w in pair} | set(NAMES) | set(ITEMS)
    return [str(n) for n in range(100)] + sorted(words)
