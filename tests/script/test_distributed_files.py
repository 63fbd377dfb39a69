"""pytest tests/script/test_distributed_files.py: files of libraries that are installed in a folder of PYTHONPATH."""

import importlib
import subprocess
import sys
import zipfile

import pytest

from memfit.script.rewritten_code import code_rewritten
from memfit.script.source_lines import SourceLines

CODE = "def even(n):\n    return n if n % 2 == 0 else None\n"
INFO = "even_numbers-1.0.dist-info"
WHEEL = {
    "even_numbers/__init__.py": CODE,
    "even_numbers_module.py": CODE,
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: even-numbers\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: memfit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
LIBRARIES, OWN = ["even_numbers", "even_numbers_module"], ["own_module", "own_package"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What ``pip install --target`` leaves, on the path, with files of the user beside it."""
    wheel, target = tmp_path / "even_numbers-1.0-py3-none-any.whl", tmp_path / "libraries"
    record = "".join(f"{name},,\n" for name in [*WHEEL, f"{INFO}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in {**WHEEL, f"{INFO}/RECORD": record}.items():
            file.writestr(name, text)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True)
    (target / "own_module.py").write_text(CODE)
    (target / "own_package").mkdir()
    (target / "own_package" / "__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield target
    for name in [*LIBRARIES, *OWN]:
        sys.modules.pop(name, None)


def test_files_that_a_distribution_names_are_a_librarys_and_others_the_users(folder):
    lines = SourceLines()
    assert not lines.is_own(str(folder / "even_numbers" / "__init__.py"))
    assert not lines.is_own(str(folder / "even_numbers_module.py"))
    assert lines.is_own(str(folder / "own_module.py"))
    assert lines.is_own(str(folder / "even_numbers" / "added.py")), "no distribution names it"


def test_modules_of_a_library_are_imported_as_they_are(folder):
    asked = []

    def remainder(value, divisor, wanted, where, text, holds):
        asked.append(where.rpartition("/libraries/")[2])
        return value % divisor

    with code_rewritten(
        SourceLines().is_own,
        remainder,
        lambda turns, *rest: turns,
        lambda where: lambda: True,
        lambda holds, *rest: holds,
    ):
        for name in [*LIBRARIES, *OWN]:
            importlib.import_module(name).even(4)
    assert asked == ["own_module.py:2", "own_package/__init__.py:2"]


def test_a_project_that_is_installed_as_editable_is_the_users(tmp_path, monkeypatch):
    """Its metadata lie beside it, or in the environment, and name none of its files as installed."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text(CODE)
    (tmp_path / "project.egg-info").mkdir()
    (tmp_path / "project.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: project\nVersion: 1.0\n")
    (tmp_path / "project.egg-info" / "SOURCES.txt").write_text("project/__init__.py\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert SourceLines().is_own(str(tmp_path / "project" / "__init__.py"))
