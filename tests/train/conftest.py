"""A disk that is really small, for runs that fill it."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 384 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", str(path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)
