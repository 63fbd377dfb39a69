"""What a result says that it was made with."""

import subprocess
from pathlib import Path

import pytest

from bench import result_file


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True)


def test_a_benchmark_that_ran_before_does_not_make_a_tree_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scripts/bench.sh`` runs one after another, and each writes its result."""
    monkeypatch.setattr(result_file, "ROOT", tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "bench" / "results" / "one.json").write_text("1\n")
    git(tmp_path, "init", "-q")
    assert result_file.commit() is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "bench" / "results" / "one.json").write_text("2\n")
    clean = result_file.commit()
    assert clean is not None
    assert len(clean) == 7
    (tmp_path / "code.py").write_text("2\n")
    assert result_file.commit() == f"{clean}-dirty"


def test_a_command_names_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a" / "b" / "memfit"
    monkeypatch.setattr(result_file, "ROOT", root)
    given = [f"{tmp_path}/cache", f"--data={tmp_path}/runs.csv", f"{root}/bench/rows.csv", "../../cut.csv", "8"]
    monkeypatch.setattr(result_file.sys, "argv", ["bench/accuracy.py", *given, "--json", "x", "--out=here.json"])
    monkeypatch.chdir(tmp_path)
    words = result_file.command().split()[3:]
    assert words == ["cache", "--data=runs.csv", "bench/rows.csv", "cut.csv", "8", "--out=here.json"]
