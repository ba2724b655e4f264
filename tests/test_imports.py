"""Imports go down only, and nothing that a model file holds is ever executed.

workflow -> harness -> {d2f, baselines} -> backbone; the method and what it is compared with never import
each other. Read from the syntax trees, so imports inside functions count and words in strings do not.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "backbone": set(),
    "d2f": {"backbone"},
    "baselines": {"backbone"},
    "harness": {"d2f", "baselines", "backbone"},
    "workflow": {"harness", "d2f", "baselines", "backbone"},
    "tests": {"workflow", "harness", "d2f", "baselines", "backbone", "benchmarks"},
    "benchmarks": {"workflow", "harness", "d2f", "baselines", "backbone"},
}


def sources() -> list[Path]:
    """Every Python file that is tracked or would be (not ignored by git)."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:  # an exported copy without .git
        found = [path for path in ROOT.rglob("*.py") if not {".venv", "results"} & set(path.parts)]
    else:
        found = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in found if path.exists()]


def imported(tree: ast.AST, package: str) -> set[str]:
    """Top-level names of everything that a module of ``package`` imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(package if node.level else node.module.split(".")[0])
    return names


def upward(text: str, package: str) -> set[str]:
    """Packages of the project that a module of ``package`` must not import, but does."""
    return (imported(ast.parse(text), package) & MAY_IMPORT.keys()) - MAY_IMPORT[package] - {package}


def name_of(node: ast.AST) -> str:
    """``torch.load`` for the syntax tree of that expression."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe_calls(text: str) -> list[str]:
    """What could run code that comes with a model or data file."""
    tree, found = ast.parse(text), []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        values = {keyword.arg: keyword.value for keyword in call.keywords}
        constants = {key: value.value for key, value in values.items() if isinstance(value, ast.Constant)}
        for switch in ("trust_remote_code", "allow_pickle"):
            if switch in values and constants.get(switch) is not False:
                found.append(f"line {call.lineno}: {switch}")
        if name_of(call.func) == "torch.load" and constants.get("weights_only") is not True:
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        if name_of(call.func) in ("eval", "exec"):
            found.append(f"line {call.lineno}: {name_of(call.func)}")
    unpicklers = imported(tree, "") & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    return found + [f"imports {name}" for name in sorted(unpicklers)]


def test_every_package_has_its_place():
    tops = {path.relative_to(ROOT).parts[0] for path in sources() if len(path.relative_to(ROOT).parts) > 1}
    assert tops <= MAY_IMPORT.keys(), "a new package: say in MAY_IMPORT what it may import"
    assert {"backbone", "d2f", "baselines", "harness"} <= tops


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_and_nothing_foreign_is_executed(path):
    text, parts = path.read_text(), path.relative_to(ROOT).parts
    if len(parts) > 1:
        assert not upward(text, parts[0])
    assert not unsafe_calls(text)


def test_no_settings_file_asks_for_remote_code():
    for folder in ("config", "profiles", "workflow", "models"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".yaml", ".yml", ".smk", ".json"):
                assert "trust_remote_code" not in path.read_text(), path


@pytest.mark.parametrize(
    ("package", "text", "wrong"),
    [
        ("d2f", "def f():\n    from baselines.llada import LLaDADecoder", {"baselines"}),
        ("baselines", "import d2f.decoding", {"d2f"}),
        ("backbone", "from harness import study", {"harness"}),
        ("d2f", "from d2f.blocks import visible\nfrom backbone.trace import Step\nfrom . import noise", set()),
    ],
)
def test_the_import_check_finds_what_it_should(package, text, wrong):
    assert upward(text, package) == wrong


@pytest.mark.parametrize(
    "text",
    [
        "model = load(folder, trust_remote_code=True)",
        "model = load(folder, trust_remote_code=anything)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "import pickle",
        "from pickle import load",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_the_safety_check_finds_what_it_should(text):
    assert unsafe_calls(text)
    assert not unsafe_calls("torch.load(path, weights_only=True)\nload(folder, trust_remote_code=False)\nmodel.eval()")
