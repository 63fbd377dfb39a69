"""A run's folder in which a file is a folder, or cannot be read: a resumed run and a report say so in one line.

python -m pytest tests/train/test_run_files.py
"""

import os
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.show.run_log import whole_lines
from memfit.train.run_files import FILES, FOLDERS
from memfit.train.run_folder import RunFolder

LINE = '{"window": 0}\n'


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """The folder of a run that trained one window."""
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    for name in FILES:
        (folder.path / name).write_text(LINE)
    return folder.path


@pytest.mark.parametrize("name", [*FILES, "final/net.safetensors"])
def test_a_folder_in_place_of_a_file_is_refused_before_a_run_goes_on(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir(parents=True)
    before = sorted(run.rglob("*"))
    with pytest.raises(InputError, match=rf"{name}: it is a folder.*; move it"):
        RunFolder(run).open(resume=True)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_place_of_a_folder_is_refused_before_a_run_goes_on(run: Path, name: str, is_link: bool) -> None:
    if name == "checkpoints":
        (run / name).rmdir()
    (run / name).symlink_to("nowhere") if is_link else (run / name).write_text("mine")
    with pytest.raises(InputError, match=rf"{name}: it is no folder.*; move it"):
        RunFolder(run).open(resume=True)
    assert is_link or (run / name).read_text() == "mine"


@pytest.mark.parametrize("name", [*FILES, "final"])
def test_what_cannot_be_read_is_refused_before_a_run_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (run / "final").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run / name)
    with pytest.raises(InputError, match=rf"{name}: it cannot be read; change its permissions"):
        RunFolder(run).open(resume=True)


def test_a_run_whose_files_are_right_goes_on(run: Path) -> None:
    (run / "final").mkdir()
    (run / "final" / "net.safetensors").write_bytes(b"")
    for replaced in ("plan.toml", "window_range.json", "final/net.safetensors"):
        (run / replaced).chmod(0o444)
    RunFolder(run).open(resume=True)


def test_a_report_refuses_lines_that_it_cannot_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole_lines(run / "metrics.jsonl") == [{"window": 0}]
    assert whole_lines(run / "nothing.jsonl") == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"metrics\.jsonl: it cannot be read"):
        whole_lines(run / "metrics.jsonl")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: it is a folder"):
        whole_lines(run / "metrics.jsonl")
