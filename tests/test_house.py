"""The house rules that a program can judge: one name for one class, docstrings that stand alone."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mars_ray

ROOT = Path(mars_ray.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
VAGUE_NAMES = {"asked", "each", "found", "given", "place", "said"}
"""Words that say nothing about the value that they name."""


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield path, node


def test_no_public_class_name_stands_for_two_classes() -> None:
    public = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in public.items() if count > 1] == []


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
