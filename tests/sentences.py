"""Sentences of pages, docstrings and messages, and rules that they are held to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache

WEAK = (
    "actually",
    "basically",
    "clearly",
    "due to the fact",
    "easily",
    "in order to",
    "just",
    "leverage",
    "obviously",
    "of course",
    "please",
    "quite",
    "really",
    "robust",
    "seamless",
    "seamlessly",
    "simply",
    "utilize",
    "very",
)
"""Words that add nothing, or that promise more than they say."""
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ITEM = re.compile(r"(?:[*-]|\d+\.) +|(?:Args|Raises|Returns|Yields):$|\w+: (?=[A-Z])")
"""The begin of an item of a list, or of a section of a docstring."""
_NO_PROSE = re.compile(r"[|#<>!:`]|.*\S {2,}\S|.*[─│┌├└]")
"""A line of a table, a heading, a picture, a directive, or columns."""
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_WEAK = re.compile(rf"\b(?:{'|'.join(WEAK)})\b", re.IGNORECASE)
_TWICE = re.compile(r"\b([a-z]+) \1\b")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and items of Markdown or of a docstring, without tables, headings and code."""
    block: list[str] = []
    for line in [*_COMMENT.sub("", _FENCE.sub("\n", text)).splitlines(), ""]:
        stripped = line.strip()
        item = _ITEM.match(stripped)
        if not stripped or item or _NO_PROSE.match(stripped):
            if block:
                yield " ".join(block)
            block = []
        if stripped and not _NO_PROSE.match(stripped):
            block.append(stripped[item.end() :] if item else stripped)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A span of code is one word, `X`."""
    for paragraph in paragraphs(text):
        plain = _LINK.sub(r"\1", _CODE.sub("X", paragraph)).replace("*", "")
        yield from re.split(r"(?<=[.!?])(?<!\b\w\.\w\.) +", plain)


def offences(sentence: str) -> Iterator[str]:
    for word in _WEAK.findall(sentence):
        yield f"{word!r} adds nothing: leave it out, or say what is meant"
    for word in _TWICE.findall(sentence):
        yield f"{word!r} twice"


@cache
def docstrings(source: str) -> Sequence[tuple[int, str]]:
    """Return line and text of each docstring, of attributes too."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in statements(ast.parse(source)) if isinstance(node, owners)]
    return [
        (child.lineno, child.value.value)
        for body in bodies
        for child in body
        if isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
    ]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it, at any depth: a tenth of the nodes that `ast.walk` visits."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield from statements(child)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each error that is raised, and of each help of an option. A value is `X`."""
    tree = ast.parse(source)
    for node in ast.walk(tree) if "help=" in source else statements(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=arguments)):
                values = arguments
            case ast.keyword(arg="help", value=value):
                values = [value]
            case _:
                continue
        for value in values:
            if text := literal(value):
                yield value.lineno, text


def literal(node: ast.expr) -> str:
    """Return the text of a string or an f-string; "" for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(literal(part) or "`X`" for part in parts)
    return ""
