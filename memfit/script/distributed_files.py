"""Files of libraries in any folder of the path, such as those of ``pip install --target``."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import sys


class DistributedFiles:
    """The files that distributions in the folders of ``sys.path`` name as their own (``*.dist-info/RECORD``).

    Other files in such a folder are no distribution's, nor are those of a project that is installed as editable, whose
    RECORD does not name them.
    """

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}
        """By folder, the paths in it."""

    def __contains__(self, file: str) -> bool:
        return any(
            file.startswith(folder) and file.removeprefix(folder).replace(os.sep, "/") in self._names_in(folder)
            for folder in {os.path.join(os.path.abspath(entry), "") for entry in sys.path}
        )

    def _names_in(self, folder: str) -> frozenset[str]:
        if folder not in self._names:
            self._names[folder] = frozenset(
                row[0]
                for distribution in importlib.metadata.distributions(path=[folder])
                for row in csv.reader((distribution.read_text("RECORD") or "").splitlines())
                if row
            )
        return self._names[folder]
