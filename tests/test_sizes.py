"""python -m pytest tests/test_sizes.py"""

import pytest

from memfit.errors import InputError
from memfit.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1), ("1KB", 1000), ("1MB", 1000**2), ("1GB", 1000**3), ("1TB", 1000**4),
        ("1KiB", 1024), ("1MiB", 1024**2), ("1GiB", 1024**3), ("1TiB", 1024**4), ("1.5gib", 3 << 29), (" 2 kb ", 2000),
    ],
)  # fmt: skip
def test_decimal_and_binary_units_are_told_apart(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["24", "GiB", "0B", "-1GiB", "24GiBs", "0.5B", "8388608TiB", "9999999TiB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (100 << 10, "100 KiB"), (3 << 29, "1.50 GiB"),
        (-(3 << 29), "-1.50 GiB"),
    ],
)  # fmt: skip
def test_sizes_are_written_in_binary_units(nbytes, text):
    assert format_size(nbytes) == text
