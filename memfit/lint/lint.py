"""All rules over a file or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from memfit.errors import InputError
from memfit.lint import allocator_rules, batch_rules, graph_rules
from memfit.lint.source import Finding, Source

Rule = Callable[[Source], Iterable[Finding]]
RULES: dict[str, Rule] = {
    "constant-accumulation": batch_rules.constant_accumulation,
    "gradients-in-validation": graph_rules.gradients_in_validation,
    "validation-with-autograd": graph_rules.validation_with_autograd,
    "kept-loss": graph_rules.kept_losses,
    "summed-loss": graph_rules.summed_losses,
    "no-set-epoch": batch_rules.missing_set_epoch,
    "sharded-twice": batch_rules.sharded_twice,
    "average-on-every-rank": batch_rules.average_on_every_rank,
    "default-reentrant": allocator_rules.default_reentrant,
    "empty-cache-in-loop": allocator_rules.empty_cache_in_loop,
}


def lint(path: Path) -> list[Finding]:
    """The findings of a file, or of every Python file of a folder, by file and line.

    Raises:
        InputError: there is no such file, no Python file in the folder, or a file is no Python.
    """
    findings: dict[tuple[str, int, str], Finding] = {}
    for file in python_files(path):
        source = Source(file)
        for rule in RULES.values():
            for finding in rule(source):
                if not source.is_ignored(finding):
                    findings[finding.file, finding.line, finding.code] = finding
    return [findings[key] for key in sorted(findings)]


def python_files(path: Path) -> Iterator[Path]:
    """The file itself, or the Python files below a folder."""
    if not path.is_dir():
        yield path
        return
    files = sorted(path.rglob("*.py"))
    if not files:
        raise InputError(str(path), "no Python file is in this folder", "write a training script")
    yield from files
