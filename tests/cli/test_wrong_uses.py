"""Wrong uses, made systematically: no traceback, and of a mistake one line on standard error with exit code 2.

pytest tests/cli/test_wrong_uses.py -m slow
"""

import contextlib
import io
import random
import traceback
from pathlib import Path

import pytest

from memfit.cli import VERBS, main
from tests.cli.asking import Run, is_one_line
from tests.cli.wrong_uses import (
    BASES,
    Use,
    wrong_bodies,
    wrong_files,
    wrong_jobs,
    wrong_options,
    wrong_plans,
    wrong_specs,
)

CODES = (0, 2, 3, 4, 5)


def fault_of(arguments: list[str]) -> str:
    """What is wrong with the answer to one command line; nothing where it is as it should be."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
        return "it returned"
    except SystemExit as stop:
        lines = [line for line in err.getvalue().splitlines() if line.startswith("memfit: ")]
        if any(line.startswith("memfit: memfit") for line in lines):
            return f"said {err.getvalue()!r}"
        if stop.code not in CODES:
            return f"exit code {stop.code}"
        return "" if stop.code != 2 or (len(lines) == 1 and not out.getvalue()) else f"said {err.getvalue()!r}"
    except BaseException:
        return traceback.format_exc(limit=-4)


def check(uses: list[Use]) -> None:
    by_name = {name: fault for name, arguments in uses if (fault := fault_of(arguments))}
    assert not by_name, "\n".join(f"{name}: {fault}" for name, fault in by_name.items())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_some_of_them(elsewhere: Path, plan: str) -> None:
    uses = [*wrong_options(), *wrong_specs(), *wrong_plans(elsewhere, plan), *wrong_jobs(elsewhere)]
    uses = [use for use in uses if use[1][0] not in ("plan", "probe") and use[1][:2] != ["jobs", "--"]]
    check(random.Random(0).sample(uses, 60))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def loss(self, nets, batch): exit(3)", "called sys.exit(3), which ends the process"),
        ("def loss(self, nets, batch): raise __import__('asyncio').CancelledError", "it raised CancelledError, which"),
        ("settings = 3", "hides the method"),
        ("__init__ = None", "hides the method"),
    ],
)
def test_a_job_that_ends_the_process_or_hides_a_method(run: Run, tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "job.py").write_text(f"from tests.cli.wrong_jobs import Right\n\nclass Wrong(Right):\n    {body}\n")
    is_one_line(run("predict", f"{tmp_path}/job.py:Wrong", "--device", "cpu", "--micro-batch", "4"), words)


WITHOUT_ARGUMENTS = ("devices", "jobs", "calibrate", "doctor")
"""Verbs that take none, or need none."""
WRONG = (
    ["a", "b", "c", "d", "--no-such-option"],
    ["--json=3", "a"],
    ["python", "train.py", "--no-such-option"],
    ["--", "python", "no/train.py", "{batch}{batch}"],
    ["no/such"],
    [],
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_names_memfit_once(run: Run, elsewhere: Path, verb: str, wrong: list[str]) -> None:
    if verb in WITHOUT_ARGUMENTS and not wrong:
        return
    code, out, err = run(verb, *wrong)
    if verb != "trace" or code == 2:  # a trace shows what it is asked for
        is_one_line((code, out, err))
    assert not err.startswith("memfit: memfit")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "calibrate"])
def test_each_verb_refuses_a_current_folder_that_was_removed(
    run: Run, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    removed = elsewhere / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    arguments = {"jobs": [], "devices": [], "doctor": []}.get(verb, BASES.get(verb, []))
    is_one_line(run(verb, *arguments), "the current folder: it was removed; change to a folder that is there with cd")


def test_a_run_folder_that_is_no_folder_is_said_to_be(run: Run, elsewhere: Path, plan: str) -> None:
    (elsewhere / "plan.toml").write_text(plan)
    (elsewhere / "dangling").symlink_to("nowhere")
    is_one_line(
        run("run", "plan.toml", "--out", "dangling"), "write another path: there is something that is no folder"
    )


def test_a_missing_choice_is_named_with_its_values(run: Run) -> None:
    is_one_line(run("export", "plan.toml"), "write --to deepspeed|")
    is_one_line(run("--"), "command line: Missing command; see memfit --help")


@pytest.mark.parametrize("verb", ["report", "lint", "compare"])
def test_a_path_that_the_system_refuses(run: Run, verb: str) -> None:
    is_one_line(run(verb, "n" * 300), "File name too long")


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "n" * 300 + ".py:Job", "--device", "rtx4090"),
        ("predict", "f5_tts/tiny", "--device", "rtx4090", "--lengths", "n" * 300 + ".csv:frames", "--epoch", "1"),
        ("audit", "n" * 300 + ".py:loader", "--world-sizes", "2"),
        ("predict", "f5_tts/tiny", "--device", "rtx4090", "--micro-batch", "2", f"--trace={'n' * 300}.npz"),
    ],
)
def test_a_path_that_the_system_refuses_within_an_argument(run: Run, arguments: tuple[str, ...]) -> None:
    is_one_line(run(*arguments), "File name too long")


def test_json_that_is_too_deep(run: Run, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 5000)
    is_one_line(run("plan", "--from-trace", f"{tmp_path}/deep.json", "--device", "rtx4090"), "it is not JSON")


@pytest.mark.slow
def test_all_of_them(elsewhere: Path, plan: str) -> None:
    uses = [*wrong_options(), *wrong_specs(), *wrong_plans(elsewhere, plan), *wrong_jobs(elsewhere)]
    uses += [*wrong_bodies(elsewhere), *wrong_files(elsewhere)]
    assert len(uses) >= 1000
    check(uses)
