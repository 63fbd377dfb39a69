"""What memfit says when something is wrong, and the exit code that goes with it."""

from __future__ import annotations

import errno
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType

from memfit.printable import one_line, printable, shortened

EXTRAS = {
    "jobs": ("diffusers", "transformers", "peft", "PIL", "soundfile", "espeakng_loader"),
    "deepspeed": ("deepspeed",),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "titan": ("torchtitan",),
}
"""The optional parts of memfit that pip installs by name, and the modules that each brings."""


class Exit(IntEnum):
    """Exit codes, the same for every verb."""

    DONE = 0
    FAULT = 1
    """A fault of memfit."""
    BAD_INPUT = 2
    """One clear line says what was seen, why it is wrong and what to write."""
    NOTHING_FITS = 3
    CHECK_FAILED = 4
    """audit, verify, or probe outside its bound."""
    STOPPED = 5
    """Stopped, and can be resumed."""


class InputError(Exception):
    """Something the user wrote is wrong. Shown as one line, without a traceback; exit code 2.

    Args:
        seen: what was seen, quoted as it was written.
        why: why it is wrong.
        write: what to write instead.
    """

    def __init__(self, seen: str, why: str, write: str) -> None:
        self.seen, self.why, self.write = seen, why, write
        super().__init__(one_line(f"{seen}: {why}; {write}"))


def why_unreadable(error: Exception) -> str:
    """Why a file of the user's could not be read, in words: what the system says, or that it is no text."""
    return getattr(error, "strerror", None) or ("not text" if isinstance(error, UnicodeError) else describe(error))


def unwritable(seen: str, error: OSError) -> InputError:
    """A file or folder of the user's that could not be written, with what to do about that error.

    Args:
        seen: the option and its path, as the user wrote it.
    """
    write = _WRITE_INSTEAD.get(error.errno or 0, "write it in a folder that can be written")
    return InputError(seen, f"cannot be written: {error.strerror or error}", write)


_WRITE_INSTEAD = {
    errno.ENOSPC: "make room on that disk, or write it to another",
    errno.EDQUOT: "make room within your quota, or write it to another disk",
    errno.ENOENT: "write it in a folder that is there",
    errno.ENOTDIR: "write it in a folder that is there",
    errno.EEXIST: "write another path: there is something that is no folder",
    errno.EISDIR: "write the path of a file, not of a folder",
    errno.ENAMETOOLONG: "write a shorter path",
}


def install_extra(extra: str) -> str:
    """The command that installs an optional part of memfit."""
    return f"pip install 'memfit[{extra}]'"


def missing_extra(error: BaseException, seen: str) -> InputError | None:
    """An exception as a module of an optional part that is not installed; None where it is something else.

    Args:
        seen: what needs the module, as the user wrote it.
    """
    for cause in chain_of(error):
        name = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        for extra, modules in EXTRAS.items():
            if name in modules and not is_installed(name):
                return InputError(seen, f"it needs {name}, which is not installed", f"run {install_extra(extra)}")
    return None


def is_installed(module: str) -> bool:
    """Whether a module is there to be imported; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def mistake_in_job(error: BaseException, *, changed: bool = False) -> InputError | None:
    """An exception as a mistake in a job's code, naming the line; None where it is a fault of memfit.

    It is a fault where memfit's own code raises it, or where no code of a job is on the way. Otherwise it is the job's,
    and the innermost frame of the job's code is named: torch and other libraries raise on what they are given, and
    memfit's tracing runs between a job and torch without a part in it. A job's code is what is not installed beside
    the libraries, and any module that defines a Job.

    Args:
        changed: whether settings were given: an exception in a built-in job comes of them, else it is memfit's fault.
    """
    frames = _frames_of(error)
    frame_of_job = _innermost_of_job(frames)
    if isinstance(error, ImportError | RuntimeError):
        seen = "this command" if frame_of_job is None or _is_built_in(frame_of_job[0]) else _place(*frame_of_job)
        if (missing := missing_extra(error, seen)) is not None:
            return missing
    if raised_by_memfit(error) or frame_of_job is None:
        return None
    frame, line = frame_of_job
    seen = _place(frame, line)
    if not _is_built_in(frame):
        return InputError(seen, describe(error), _remedy(error, frames))
    return InputError(seen, describe(error), "take back what --set changed") if changed else None


def raised_by_memfit(error: BaseException) -> bool:
    """Whether memfit's own code raises an exception, or no code that a file holds does."""
    frames = _frames_of(error)
    while frames and _passes_on(*frames[-1]):
        frames.pop()
    return not frames or _is_ours(frames[-1][0])


def _frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """Frames with their lines, the outermost first."""
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")
    ]


_NO_CARD = (
    "not compiled with CUDA enabled", "not linked with support for cuda", "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)  # fmt: skip
"""What torch says where code asks for a card that is not there: builds for the CPU, no driver, no card."""


_NESTED = (
    "self.shape_env must not be None", "'nested_int_memo'", "NestedTensorImpl doesn't support sizes",
    "No viable backend for scaled_dot_product_attention",
)  # fmt: skip
"""What torch says of nested tensors without data, of both layouts."""
PADDED = "give that operator padded tensors: a prediction follows few operators on nested ones"
"""What to do about such an error."""


def is_of_nested_tensors(error: BaseException) -> bool:
    """Whether an operator fails because its nested tensors have no data in a prediction."""
    return any(words in str(error) for words in _NESTED)


def _remedy(error: BaseException, frames: Iterable[tuple[FrameType, int]]) -> str:
    """What to do about an exception in a job's code."""
    if isinstance(error, OSError) and any(frame.f_code.co_name == "from_pretrained" for frame, _ in frames):
        return "download it once where there is a network, or build the net from its configuration, which needs none"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install {error.name.partition('.')[0]}, or take the import out"
    if any(words in str(error) for words in _NO_CARD):
        return "leave .cuda() and device='cuda' out: memfit moves nets and batches to the device"
    if is_of_nested_tensors(error):
        return PADDED
    if "Expected more than 1 value per channel when training" in str(error):
        return (
            "batch normalisation refuses one item: ask for two or more, such as --micro-batch 2, and in a run for a"
            " --global-batch that leaves no sample alone at the end of an epoch"
        )
    return "mend the job at that line"


def _passes_on(frame: FrameType, line: int) -> bool:
    """Whether a frame is one of memfit's through which torch calls an operator, at the call: what the operator raises
    from C has no frame of its own."""
    code = frame.f_code
    passes = code.co_name in ("__torch_function__", "__torch_dispatch__") and _is_ours(frame)
    return passes and "func(*args" in linecache.getline(code.co_filename, line)


def line_of_job(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """``net.py:41 in loss()``: the innermost line of a job's code; None where there is none.

    Args:
        frames: with their lines, the outermost first.
    """
    frame_of_job = _innermost_of_job(frames)
    return None if frame_of_job is None else _place(*frame_of_job)


_FAULTHANDLER_CALL = re.compile(r'File "(.+)", line (\d+) in (\S+)')


def with_source(stack: str) -> str:
    """The text that ``faulthandler`` writes of a stack, each call with its line of source."""

    def call_with_source(call: re.Match[str]) -> str:
        source = linecache.getline(call[1], int(call[2])).strip()
        return f"{call[0]}\n    {source}" if source else call[0]

    return _FAULTHANDLER_CALL.sub(call_with_source, stack)


def line_of_job_in(stack: str) -> str | None:
    """As ``line_of_job``, in the text that ``faulthandler`` writes of a stack, the innermost call first."""
    ours = str(Path(__file__).parent) + os.sep
    for file, line, name in _FAULTHANDLER_CALL.findall(stack):
        if not (file.startswith((ours, "<")) or is_library(file)):
            return f"{_near(file)}:{line} in {name}()"
    return None


def call_in(stack: str) -> str | None:
    """The innermost call in the text that ``faulthandler`` writes of a stack, of a library's or of any code."""
    call = _FAULTHANDLER_CALL.search(stack)
    return None if call is None else f"{_near(call[1])}:{call[2]} in {call[3]}()"


def _innermost_of_job(frames: Iterable[tuple[FrameType, int]]) -> tuple[FrameType, int] | None:
    jobs = {kind.__module__ for kind in _job_classes()}
    for frame, line in reversed(list(frames)):
        file = frame.f_code.co_filename
        if file.startswith("<"):
            continue
        if frame.f_globals.get("__name__") in jobs or not (_is_ours(frame) or is_library(file)):
            return frame, line
    return None


def _place(frame: FrameType, line: int) -> str:
    return f"{_near(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}()"


def message_of(error: BaseException) -> str:
    """What an exception says; empty where it says nothing, or where saying it raises: its class may be the job's."""
    try:
        return str(error)
    except Exception:
        return ""


def how_it_left(error: BaseException) -> str:
    """How code of a job left by what is no ``Exception``: ``called sys.exit(0)``, ``raised CancelledError``."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({shortened(repr(error.code))})"
    return f"raised {describe(error)}"


def mistake_of_leaving(error: BaseException) -> InputError:
    """What is no ``Exception`` and came out of a job (``sys.exit``, say), as a mistake in its code."""
    seen = line_of_job(traceback.walk_tb(error.__traceback__)) or "the job's code"
    write = "return from it, or raise an exception that says what is wrong"
    return InputError(seen, f"it {how_it_left(error)}, which ends the process", write)


def describe(error: BaseException) -> str:
    """``ValueError: what it says``, in one line of at most 240 characters.

    Of an import that failed, and of a message whose first line ends with a colon, also why: the exception that caused
    it, or the last line of its message.
    """
    text, root = _first_line(error), _root(error)
    if isinstance(error, ImportError) or isinstance(root, ImportError) or text.endswith(":"):
        cause = _last_line(error) if root is error else _first_line(root)
        if cause and cause not in text:
            text = f"{shortened(text, 236 - min(len(cause), 160))} ({shortened(cause, 160)})"
    return shortened(printable(text))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    """The last line of a message of several; empty for another."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[-1] if len(lines) > 1 else ""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from and what was being handled then, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _root(error: BaseException) -> BaseException:
    """The first exception of the chain that led to this one; the exception itself where there is none."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is memfit's machinery: not one of its jobs, nor the base class that jobs inherit from."""
    name = getattr(frame.f_globals.get("__spec__"), "name", None) or frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] == "memfit" and not name.startswith("memfit.job")


LIBRARY_FOLDERS = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""What the paths of the standard library's files and of installed ones begin with."""


def is_library(file: str) -> bool:
    """Whether a file is of the standard library, installed, or compiled (then its source is not there)."""
    return file.startswith(LIBRARY_FOLDERS) or not Path(file).is_file()


def _is_built_in(frame: FrameType) -> bool:
    """Whether a frame is of a built-in job, whose lines say nothing to the person who asks."""
    return (frame.f_globals.get("__name__") or "").startswith("memfit.jobs")


def _job_classes() -> Iterator[type]:
    """Every class of a job that was loaded; this module lies below theirs, and looks it up."""
    loaded = sys.modules.get("memfit.job")
    classes = [loaded.Job] if loaded else []
    while classes:
        subclasses = classes.pop().__subclasses__()
        yield from subclasses
        classes += subclasses


def _near(path: str) -> str:
    """A path as a person would write it from here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # the folder may be removed
        return path
