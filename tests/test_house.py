"""The house rules that a program can judge: sizes, one name for one class, docstrings that stand alone."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mars_ray

ROOT = Path(mars_ray.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
VAGUE_NAMES = {"asked", "each", "found", "given", "place", "said"}
"""Words that say nothing about the value that they name."""
LINES_OF_A_FILE, LINES_OF_A_CLASS, LINES_OF_A_FUNCTION = 350, 300, 60


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield path, node


def longer_than(lines: int, *kinds: type[ast.AST]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {node.name}"  # type: ignore[attr-defined]
        for path, node in nodes(*kinds)
        if node.end_lineno - node.lineno + 1 > lines  # type: ignore[attr-defined]
    ]


def test_no_public_class_name_stands_for_two_classes() -> None:
    public = Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in public.items() if count > 1] == []


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LINES_OF_A_FILE} == {}


def test_functions_and_classes_are_short() -> None:
    assert longer_than(LINES_OF_A_FUNCTION, ast.FunctionDef, ast.AsyncFunctionDef) == []
    assert longer_than(LINES_OF_A_CLASS, ast.ClassDef) == []


def test_no_docstring_goes_on_with_a_sentence_that_nobody_sees() -> None:
    strings = [
        (path, node.value.value)  # type: ignore[attr-defined]
        for path, node in nodes(ast.Expr)
        if isinstance(getattr(node.value, "value", None), str)  # type: ignore[attr-defined]
    ]
    assert [f"{path.relative_to(ROOT)}: {text[:60]}" for path, text in strings if text.startswith("Of ")] == []


def test_names_say_what_they_hold() -> None:
    names = [
        (path, node.id if isinstance(node, ast.Name) else node.arg)  # type: ignore[attr-defined]
        for path, node in nodes(ast.Name, ast.arg)
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store)
    ]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in names if name in VAGUE_NAMES] == []
