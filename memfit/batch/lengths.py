"""Lengths of samples: from an array, from a column of a table, or by reading the headers of audio files."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import write_atomic
from memfit.errors import InputError, describe


def as_lengths(values: Any) -> np.ndarray:
    """Lengths as an int64 or float64 array (N,), all above 0.

    Raises:
        InputError: not one positive number for each sample, with the id of the first that is not.
    """
    try:
        lengths = np.asarray(values)
        lengths = lengths.astype(np.int64 if lengths.dtype.kind in "iub" else np.float64, copy=False)
    except (TypeError, ValueError):
        raise InputError("lengths", "not numbers", "give one length for each sample") from None
    if lengths.ndim != 1:
        raise InputError(f"lengths of shape {lengths.shape}", "not one for each sample", "give an array of shape (N,)")
    wrong = ~(np.isfinite(lengths) & (lengths > 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise InputError(f"sample {first}", f"its length is {lengths[first]:g}", "give lengths above 0")
    return lengths


def column_lengths(path: str | Path, column: str) -> np.ndarray:
    """Lengths from a column of a ``.csv``, ``.tsv`` or ``.jsonl`` file, one row a sample.

    Raises:
        InputError: no such column, a value that is not a positive number, another kind of file.
    """
    path = Path(path)
    values: list[float] = []
    for row, record in enumerate(_records(path)):
        if column not in record:
            have = ", ".join(map(str, record)) or "none"
            raise InputError(f"{path} row {row}", f"no column {column!r}", f"write one of its columns: {have}")
        try:
            values.append(float(record[column]))
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{path} row {row}", f"{column} is {record[column]!r}", "write a length there") from None
    lengths = np.array(values)
    integral = bool(len(lengths)) and bool(np.all((lengths == np.floor(lengths)) & (np.abs(lengths) < 2**53)))
    return as_lengths(lengths.astype(np.int64) if integral else lengths)


def _records(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        raise InputError(str(path), "no such file", "write the path of a .csv, .tsv or .jsonl file")
    if path.suffix not in (".jsonl", ".csv", ".tsv"):
        raise InputError(str(path), "not a table that is known", "write a .csv, .tsv or .jsonl file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                yield from (_object(line) for line in file if line.strip())
            else:
                yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}", "write the path of a readable file") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(str(path), f"not a {path.suffix[1:]} file in UTF-8: {describe(error)}", "repair it") from error


def _object(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a line is no object: {line.strip()[:40]}")
    return record


def audio_lengths(
    files: Sequence[str | Path],
    *,
    rate: int | None = None,
    hop: int = 1,
    cache: str | Path | None = None,
    threads: int = 8,
    progress: bool = True,
) -> np.ndarray:
    """Length of every audio file in frames of ``hop`` samples, from its header; int64 (N,).

    Args:
        rate: sample rate that the files are resampled to before framing; None: their own.
        hop: audio samples of a frame; 1 counts samples.
        cache: a JSON file that keeps what was read, by path, size and time of change; None: nothing is kept.
        progress: a bar on standard error.

    Raises:
        InputError: a file that cannot be read as audio, or shorter than one frame.
    """
    known = _read_cache(cache)
    keys = [_key(file) for file in files]
    missing = [index for index, key in enumerate(keys) if key not in known]
    if missing:
        try:
            with ThreadPoolExecutor(threads) as pool:
                read = pool.map(_header, [files[index] for index in missing])
                for index, header in zip(missing, _shown(read, len(missing), progress), strict=True):
                    known[keys[index]] = header
        finally:
            _write_cache(cache, known)
    samples, rates = np.array([known[key] for key in keys], dtype=np.int64).reshape(-1, 2).T
    lengths = (samples if rate is None else samples * rate // rates) // hop
    if len(lengths) and lengths.min() < 1:
        short = int(np.argmin(lengths))
        raise InputError(str(files[short]), f"shorter than one frame of {hop} samples", "leave the file out")
    return lengths


def _header(file: str | Path) -> tuple[int, int]:
    import soundfile

    try:
        info = soundfile.info(str(file))
    except soundfile.SoundFileError as error:
        raise InputError(str(file), f"not readable audio ({error})", "leave the file out or repair it") from None
    return info.frames, info.samplerate


def _key(file: str | Path) -> str:
    try:
        status = os.stat(file)
    except OSError:
        raise InputError(str(file), "no such file", "write the path of an audio file") from None
    return f"{os.path.abspath(file)}|{status.st_size}|{status.st_mtime_ns}"


def _read_cache(cache: str | Path | None) -> dict[str, Any]:
    if cache is None or not Path(cache).is_file():
        return {}
    try:
        known: dict[str, Any] = json.loads(Path(cache).read_text(encoding="utf-8"))
        if not isinstance(known, dict) or not all(map(_is_header, known.values())):
            raise ValueError("no lengths by file")
    except (ValueError, RecursionError):
        raise InputError(str(cache), "not a cache of lengths", "delete the file, or write another path") from None
    return known


def _is_header(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def _write_cache(cache: str | Path | None, known: dict[str, Any]) -> None:
    if cache is None:
        return
    write_atomic(cache, json.dumps(known))


def _shown(items: Iterable[Any], total: int, progress: bool) -> Iterable[Any]:
    if not progress:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "reading lengths", total=total, console=Console(stderr=True), transient=True)
