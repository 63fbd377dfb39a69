"""Whose code a file is, where folders lie side by side whose names begin alike."""

import sysconfig
from pathlib import Path

import memfit
from memfit.errors import is_library
from memfit.script.failures import _own_traceback

MEMFIT = Path(memfit.__file__).parent


def test_a_folder_beside_the_standard_library_whose_name_begins_as_its_own_is_no_library(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert is_library(f"{sysconfig.get_path('purelib')}/torch/nn.py")
    assert not is_library(f"{sysconfig.get_path('stdlib')}_of_mine/net.py")


def test_a_traceback_shows_a_script_whose_folder_s_name_begins_with_memfit():
    shown = []
    for folder in (f"{MEMFIT}_jobs", str(MEMFIT)):
        try:
            exec(compile("raise ValueError", f"{folder}/train.py", "exec"))
        except ValueError as error:
            shown.append(f"{folder}/train.py" in _own_traceback(error))
    assert shown == [True, False]
