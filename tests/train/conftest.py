"""A disk that is really small, for runs that fill it."""

import pytest

from testing.small_disk import small_disk


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path):
    """A real file system of 384 KiB."""
    with small_disk(tmp_path / "disk", size="384k") as disk:
        if not disk.mounted:
            pytest.skip("no file system can be mounted here")
        yield tmp_path / "disk"
