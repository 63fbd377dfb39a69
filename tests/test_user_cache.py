"""The user's folders, as the XDG Base Directory specification has them."""

import pytest

from memfit.device.hardware.catalogue import added_cards_file
from memfit.user_cache import cache_folder

READERS = [("XDG_CACHE_HOME", cache_folder, ".cache/memfit"), ("XDG_CONFIG_HOME", added_cards_file, ".config/memfit")]


@pytest.mark.parametrize(("variable", "reader", "default"), READERS)
@pytest.mark.parametrize("written", ["", "cache", "./cache", "~/cache", None])
def test_a_relative_path_is_ignored(monkeypatch, tmp_path, variable, reader, default, written):
    monkeypatch.setenv("HOME", str(tmp_path))
    if written is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, written)
    assert str(reader()).startswith(f"{tmp_path}/{default}")


@pytest.mark.parametrize(("variable", "reader", "default"), READERS)
def test_a_full_path_is_taken(monkeypatch, tmp_path, variable, reader, default):
    monkeypatch.setenv(variable, f"{tmp_path}/given")
    assert str(reader()).startswith(f"{tmp_path}/given/memfit")
