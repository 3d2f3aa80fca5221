"""Python source made small, the same text whichever Python makes it.

The text is cut out of the source and never written by `ast.unparse`: since Python 3.12 that nests equal quotes in
f-strings, and no older Python parses those.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

_Position = tuple[int, int]  # line from 1, column from 0
_Span = tuple[_Position, _Position]
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_F_STRING_START, _F_STRING_END = (getattr(tokenize, f"FSTRING_{part}", -1) for part in ("START", "END"))


def minified(source: str) -> str:
    """`source` without docstrings, comments, annotations and empty lines, indented by one space a level.

    Imports of which only annotations use a name go too.

    A body that is only a docstring keeps it. ValueError if `source` is not ASCII: columns of a syntax tree are bytes.
    """
    if not source.isascii():
        raise ValueError("only ASCII source can be minified")
    tree = ast.parse(source)
    unwanted = list(_unwanted(tree))
    unwanted += _unused_imports(tree, unwanted)
    written: list[str] = []
    depth, end, line_starts = 0, (0, 0), True
    for kind, text, start, stop in _tokens(source):
        if kind == tokenize.INDENT:
            depth += 1
        elif kind == tokenize.DEDENT:
            depth -= 1
        elif any(first <= start < last for first, last in unwanted):
            continue
        elif kind == tokenize.NEWLINE:
            if not line_starts:  # else the whole line was unwanted
                written.append("\n")
            line_starts = True
        else:
            gap = start != end and bool(written) and _is_word(written[-1][-1]) and _is_word(text[0])
            written.append(depth * " " if line_starts else " " if gap else "")
            written.append(text)
            line_starts, end = False, stop
    return "".join(written)


def _is_word(character: str) -> bool:
    """Whether a space beside `character` may separate two words, or a word and a string."""
    return character.isalnum() or character in "_'\""


def _tokens(source: str) -> Iterator[tuple[int, str, _Position, _Position]]:
    """Kind, text, start and end of each token that counts; an f-string is one of them, as before Python 3.12."""
    lines = source.splitlines(keepends=True)
    nested, first = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == _F_STRING_START:
            nested += 1
            first = token.start if nested == 1 else first
        elif token.type == _F_STRING_END:
            nested -= 1
            if not nested:
                yield tokenize.STRING, _between(lines, first, token.end), first, token.end
        elif not nested and token.type not in _SILENT:
            yield token.type, token.string, token.start, token.end


def _between(lines: list[str], start: _Position, end: _Position) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    whole = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *whole, lines[end[0] - 1][: end[1]]])


def _unwanted(tree: ast.Module) -> Iterator[_Span]:
    """Where docstrings and annotations stand, with the mark that introduces each annotation."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) and node.body[1:]:
            yield _span(node.body[0])
        if isinstance(node, ast.arg) and node.annotation:
            yield (node.lineno, node.col_offset + len(node.arg)), _end(node.annotation)
        if isinstance(node, ast.FunctionDef) and node.returns:
            line, column = _span(node.returns)[0]
            yield (line, column - len("-> ")), _end(node.returns)
        if isinstance(node, ast.AnnAssign):
            yield (_end(node.target), _end(node.annotation)) if node.value else _span(node)


def _unused_imports(tree: ast.Module, unwanted: list[_Span]) -> Iterator[_Span]:
    """`from` imports with no name that is used elsewhere than in `unwanted`; `__future__`'s are among them."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {name.id for name in names if not any(first <= _span(name)[0] < last for first, last in unwanted)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and used.isdisjoint(alias.asname or alias.name for alias in node.names):
            yield _span(node)


def _span(node: ast.stmt | ast.expr) -> _Span:
    return (node.lineno, node.col_offset), _end(node)


def _end(node: ast.stmt | ast.expr) -> _Position:
    assert node.end_lineno is not None and node.end_col_offset is not None  # `parse` gives both
    return node.end_lineno, node.end_col_offset
