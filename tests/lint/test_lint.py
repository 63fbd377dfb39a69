"""Every rule finds its mistake at its line, and nothing in code that is right.

pytest tests/lint/test_lint.py
"""

import json
import os
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.errors import InputError
from memfit.lint.lint import RULES, lint
from tests.lint.cases import RIGHT, WRONG

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(os.environ.get("MEMFIT_OTHER_SCRIPTS", ROOT.parent / "shared" / "scripts"))
"""Training scripts of other projects, where a machine has them."""


def written(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in WRONG.items() for text in texts])
def test_a_mistake_is_found_at_its_line_alone(tmp_path: Path, code: str, text: str) -> None:
    (finding,) = lint(written(tmp_path, text))
    line = next(number for number, content in enumerate(text.splitlines(), 1) if "# HERE" in content)
    assert (finding.code, finding.line) == (code, line)
    assert all((finding.what, finding.why, finding.cure))


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in RIGHT.items() for text in texts])
def test_code_that_is_right_has_no_finding(tmp_path: Path, code: str, text: str) -> None:
    assert lint(written(tmp_path, text)) == []


def test_every_rule_has_cases() -> None:
    assert RULES.keys() == WRONG.keys() == RIGHT.keys()


@pytest.mark.parametrize("code", WRONG)
def test_a_line_that_says_so_is_passed_over(tmp_path: Path, code: str) -> None:
    assert lint(written(tmp_path, WRONG[code][0].replace("# HERE", "# memfit: ignore"))) == []


def test_the_projects_examples_have_no_finding() -> None:
    """The one that shows mistakes has its own."""
    findings = lint(ROOT / "examples")
    assert {Path(finding.file).name for finding in findings} == {"mistakes.py"}
    assert [finding.code for finding in findings] == ["constant-accumulation", "summed-loss"]


@pytest.mark.skipif(not SCRIPTS.is_dir(), reason="the scripts of other projects are not on this machine")
def test_in_scripts_of_other_projects_only_true_mistakes_are_found() -> None:
    """EMAModel is made on every rank, and VideoMAEv2 checkpoints with the old default."""
    collected = [(Path(finding.file).name, finding.line, finding.code) for finding in lint(SCRIPTS)]
    assert collected == [
        ("train_unconditional.py", 410, "average-on-every-rank"),
        ("videomaev2_pretrain.py", 133, "default-reentrant"),
        ("videomaev2_pretrain.py", 225, "default-reentrant"),
    ]


@pytest.mark.parametrize("text", ["def f(:\n", "\x00", "(" * 5000, "print 'two'\n"])
def test_what_is_no_python_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        lint(written(tmp_path, text))
    with pytest.raises(SystemExit) as caught:
        main(["lint", str(tmp_path / "train.py")])
    assert (caught.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"x = '\xe9'\n", "invalid or missing encoding"), (b"x = 1\n" * 4 + b"y = '\xe9'\n", "it is not UTF-8"),
        (b"# coding: nonsense\n", "unknown encoding"),
    ],
)  # fmt: skip
def test_bytes_that_python_refuses_are_not_passed_over(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why):
        lint(path)


@pytest.mark.parametrize("content", [b"# coding: latin-1\nx = '\xe9'\n", b"\xef\xbb\xbfx = '\xc3\xa9'\n"])
def test_encodings_that_python_reads_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    assert not lint(path)


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "no.py", tmp_path):
        with pytest.raises(InputError):
            lint(path)


@pytest.mark.parametrize("wrong", [True, False])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: bool) -> None:
    text = (WRONG if wrong else RIGHT)["summed-loss"][0]
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as caught:
            main(["lint", str(written(tmp_path, text)), *arguments])
        out = capsys.readouterr().out
        assert caught.value.code == (4 if wrong else 0)
        if arguments:
            answer = json.loads(out)
            assert (answer["files"], answer["ok"], len(answer["findings"])) == (1, not wrong, int(wrong))
        else:
            assert out.startswith("1 mistake found in 1 file." if wrong else "No mistake found in 1 file.")
