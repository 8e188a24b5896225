#!/usr/bin/env python3
"""Lines of code per package against their budgets; exit status 1 where one is exceeded.

A line of code is one that is neither blank, nor a comment, nor part of a docstring.
"""

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The engine is meant to be read whole; raising a budget is a decision for docs/LOG.md.
BUDGETS = {"minisgl": 7_000, "minisgl_worker": 6_000}
OTHERS = ("tests", "scripts", "benchmarks", "examples")
MAX_FILE_LINES = 400
IGNORED_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def count_code_lines(path: Path) -> int:
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in IGNORED_TOKENS and token.type != tokenize.ENDMARKER:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - find_docstring_lines(path))


def find_docstring_lines(path: Path) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def main() -> int:
    failures = []
    for name in (*BUDGETS, *OTHERS):
        files = sorted((ROOT / name).rglob("*.py"))
        total = sum(count_code_lines(path) for path in files)
        budget = BUDGETS.get(name)
        print(f"{name:16} {len(files):4} files {total:6,} lines of code" + (f", budget {budget:,}" if budget else ""))
        if budget and total > budget:
            failures.append(f"{name} has {total:,} lines of code, budget {budget:,}")
        if budget:
            lengths = {path: len(path.read_text().splitlines()) for path in files}
            failures += [
                f"{path.relative_to(ROOT)} has {length} lines, limit {MAX_FILE_LINES}"
                for path, length in lengths.items()
                if length > MAX_FILE_LINES
            ]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
