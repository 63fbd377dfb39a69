"""Mutations of memfit's code, each run against the tests nearest to it: which of them no test notices.

python -m bench.mutation [--count 60] [--seed 0] [--only replay] [--json FILE]
python -m bench.mutation --again FILE [--json FILE]    # what survived in FILE, once more: with the tests of now

A mutation changes one comparison, operator, condition or call. It is made in a copy of the checkout, and the fast tests
that ``NEAREST`` names for its folder run there until the first one fails; files that name the mutated module run first.
Killed: a test fails, or the tests do not end in ``--limit`` seconds. The same seed makes the same mutations of the same
code.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.result_file import ROOT, add_json_option, target, write_result

NEAREST: dict[str, list[str]] = {
    "memfit/geometry.py": ["tests/test_geometry.py"],
    "memfit/sizes.py": ["tests/test_sizes.py"],
    "memfit/batch": ["tests/batch"],
    "memfit/replay": ["tests/replay", "tests/trace/test_categories.py"],
    "memfit/apply": ["tests/apply"],
    "memfit/planner": ["tests/planner"],
    "memfit/train/checkpoint": [
        "tests/train/test_checkpoints.py",
        "tests/train/test_state_codec.py",
        "tests/train/test_sharded_saver.py",
        "tests/attack/test_parts.py",
    ],
    "memfit/verify": ["tests/verify"],
}
"""Mutated files and folders, and the tests that are run for each."""
MOST_OF_A_FILE = 3
"""Mutations of an entry of ``NEAREST`` that is a file: it has fewer than a folder."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
EQUIVALENT = {
    (
        "memfit/replay/fast_replay.py",
        "alive * MIN_BLOCK >= beaten",
    ): "a peak that only equals the one to beat may be told too low, and is now told exactly",
    (
        "memfit/batch/packing.py",
        "both > 2 * world",
    ): "the last step holds fewer than world samples and at least one, so both steps never hold exactly 2 * world",
    (
        "memfit/batch/windows.py",
        "self._starts[-1] < number",
    ): "an epoch's windows are also made when they are asked for",
    (
        "memfit/apply/losses.py",
        "len(losses) >= 1",
    ): "a single loss without valid units takes no step, whatever its value",
}
"""(file, changed source) of mutations that change nothing that can be seen, and why."""
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change: the file, its line, the source before and after."""

    file: str
    line: int
    before: str
    after: str
    source: str
    """The whole file with the change."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests said of one mutation."""

    file: str
    line: int
    before: str
    after: str
    killed: bool
    seconds: float
    why: str
    """Why a mutation that survived changes nothing; empty: it is killed, or no test sees it."""


def mutations(path: Path) -> Iterator[Mutation]:
    """Every mutation of one file, in the order of its lines. Docstrings, annotations and errors' texts stay."""
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (changed := _changed(node)) is None:
            continue
        before, after = ast.unparse(node), ast.unparse(changed)
        segment = ast.get_source_segment(text, node)
        if segment is None or before == after:
            continue
        start = _offset(text, node.lineno, node.col_offset)  # type: ignore[attr-defined]
        source = text[:start] + f"({after})" + text[start + len(segment) :]
        yield Mutation(
            file=str(path.relative_to(ROOT)), line=node.lineno,  # type: ignore[attr-defined]
            before=before, after=after, source=source,
        )  # fmt: skip


def _changed(node: ast.AST) -> ast.AST | None:
    """The node with one change; None where it is of no kind that is mutated."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.Compare(left=node.left, ops=[SWAPS[type(node.ops[0])]()], comparators=node.comparators)  # type: ignore[list-item]
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
        return ast.BinOp(left=node.left, op=SWAPS[type(node.op)](), right=node.right)  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(op=SWAPS[type(node.op)](), values=node.values)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        return ast.Call(func=ast.Name(id=CALLS[node.func.id]), args=node.args, keywords=node.keywords)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)
    return None


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
               for part in ast.walk(node))  # fmt: skip


def _offset(text: str, line: int, column: int) -> int:
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def chosen(count: int, seed: int, only: str) -> list[tuple[Mutation, list[str]]]:
    """``count`` mutations: ``MOST_OF_A_FILE`` of each file in ``NEAREST``, and equally many of each folder."""
    rng, groups = random.Random(seed), []
    for name, tests in NEAREST.items():
        if only in name:
            path = ROOT / name
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            every = [mutation for file in files for mutation in mutations(file)]
            rng.shuffle(every)
            groups.append([(mutation, tests) for mutation in every[: None if path.is_dir() else MOST_OF_A_FILE]])
    picked = []
    while len(picked) < count and any(groups):
        picked += [group.pop() for group in groups if group][: count - len(picked)]
    return picked


def survivors(outcomes: list[Outcome]) -> Iterator[tuple[int, Mutation | None, list[str]]]:
    """(place in the outcomes, the mutation in the code of now or None where that is gone, its tests) of what survived
    without a reason."""
    for place, known in enumerate(outcomes):
        if known.killed or known.why:
            continue
        file = ROOT / known.file
        same = [
            mutation
            for mutation in (mutations(file) if file.exists() else ())
            if (mutation.before, mutation.after) == (known.before, known.after)
        ]
        tests = next(tests for name, tests in NEAREST.items() if known.file.startswith(name))
        yield place, min(same, key=lambda mutation: abs(mutation.line - known.line), default=None), tests


def test_files(tests: list[str], file: Path) -> list[str]:
    """The files of these tests; those that name the module of ``file`` come first."""
    paths = [ROOT / test for test in tests]
    every = [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    module = re.compile(rf"\b{file.stem}\b")
    ordered = sorted(every, key=lambda test: module.search(test.read_text()) is None)
    return [str(test.relative_to(ROOT)) for test in ordered]


def outcome(mutation: Mutation, tests: list[str], copy: Path, limit: float) -> Outcome:
    """Runs the tests in a copy of the checkout that has the mutation, and puts the file back."""
    file = copy / mutation.file
    original = file.read_text()
    file.write_text(mutation.source)
    begin = time.monotonic()
    files = test_files(tests, Path(mutation.file))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    try:
        ended = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            timeout=limit,
            check=False,
        )
        killed = ended.returncode != 0
    except subprocess.TimeoutExpired:
        killed = True
    finally:
        file.write_text(original)
    return Outcome(
        file=mutation.file, line=mutation.line, before=mutation.before, after=mutation.after,
        killed=killed, seconds=round(time.monotonic() - begin, 1),
        why="" if killed else EQUIVALENT.get((mutation.file, mutation.after), ""),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="a result of this command: only what survived there is run")
    parser.add_argument("--only", default="", help="text that a key of NEAREST contains")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for the tests of one mutation")
    add_json_option(parser)
    options = parser.parse_args()
    outcomes, seed = [], options.seed
    if options.again:
        content = json.loads(options.again.read_text())
        outcomes, seed = [Outcome(**known) for known in content["outcomes"]], content["seed"]
        pending = list(survivors(outcomes))
    else:
        picked = chosen(options.count, options.seed, options.only)
        pending = [(place, mutation, tests) for place, (mutation, tests) in enumerate(picked)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "runs", "__pycache__"))
        for place, mutation, tests in pending:
            if mutation is None:
                result = replace(outcomes[place], why="this code is gone")
            else:
                result = outcome(mutation, tests, copy, options.limit)
            outcomes[place : place + 1] = [result]
            state = "killed" if result.killed else "equivalent" if result.why else "SURVIVED"
            print(f"{state} {result.file}:{result.line} {result.before} -> {result.after}", flush=True)
    killed = sum(result.killed for result in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    figures = {
        "seed": seed, "mutations": len(outcomes), "killed": killed,
        "outcomes": [asdict(result) for result in outcomes],
    }  # fmt: skip
    write_result(target(options.json, complete=not options.only), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
