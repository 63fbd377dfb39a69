"""Parses a training command: ``python train.py``, ``python -m package``, and the commands of launchers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.errors import InputError
from memfit.script.outcome import ScriptCommand

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?|pypy3?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_RUNNERS = (("uv", "run"), ("poetry", "run"), ("pdm", "run"), ("pipenv", "run"), ("hatch", "run"), ("env",), ("time",),
            ("nohup",), ("exec",))  # fmt: skip
_PYTHON_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
_TORCHRUN_FLAGS = {"standalone", "no-python", "module", "m", "run-path"}
_DEEPSPEED_FLAGS = {"no_python", "module", "no_local_rank", "force_multi", "save_pid", "bind_cores_to_rank",
                    "no_ssh", "no_ssh_check", "enable_each_rank_log"}  # fmt: skip
_ALL = ("gpu", "cpu", "xpu", "auto", "-1")
"""What launchers take for as many processes as there are cards, or processors."""
_WRITE = "write -- python train.py ARGS, or python -m package, torchrun, accelerate launch or deepspeed behind --"


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    options: dict[str, str]
    rest: tuple[str, ...]


def parse_command(words: Sequence[str]) -> ScriptCommand:
    """Returns the script that a command runs, and what its launcher passes on.

    Raises:
        InputError: the command names no script, or the file does not exist.
    """
    rest, environment = list(words), {}
    while rest:
        assignment = _ASSIGNMENT.fullmatch(rest[0])
        runner = next((some for some in _RUNNERS if tuple(rest[: len(some)]) == some), None)
        if assignment:
            environment[assignment[1]] = assignment[2]
            del rest[0]
        elif runner:
            del rest[: len(runner)]
        else:
            break
    command = _checked(_of_program(rest, words))
    return replace(command, environment=command.environment | environment)


def _of_program(words: list[str], said: Sequence[str]) -> ScriptCommand:
    if not words:
        raise InputError(" ".join(("--", *said)), "there is no script to trace", _WRITE)
    name, rest = Path(words[0]).name, words[1:]
    if _PYTHON.fullmatch(name):
        _check_interpreter(words[0])
        return _of_python(rest, said)
    if name == "torchrun":
        return _torchrun(rest, said)
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            raise InputError(" ".join(said), "accelerate runs a script by its verb launch", _WRITE)
        return _accelerate(rest[1:], said)
    if name == "deepspeed":
        return _deepspeed(rest, said)
    if name.endswith(".py"):
        return ScriptCommand(target=words[0], args=tuple(rest))
    program = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{Path(sys.executable).parent}") or (
        shutil.which(words[0])
    )
    if program and Path(program).read_bytes()[:2] == b"#!" and b"python" in Path(program).read_bytes()[:200]:
        return ScriptCommand(target=program, args=tuple(rest))
    raise InputError(" ".join(("--", *said)), f"{words[0]!r} is not a Python script", _WRITE)


def _of_python(words: list[str], said: Sequence[str]) -> ScriptCommand:
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m" and words:
            module, rest = words[0], words[1:]
            if module in ("torch.distributed.run", "torch.distributed.launch"):
                return _torchrun(rest, said)
            if module == "accelerate.commands.launch":
                return _accelerate(rest, said)
            if module == "deepspeed.launcher.runner":
                return _deepspeed(rest, said)
            return ScriptCommand(target=module, is_module=True, args=tuple(rest))
        if option == "-c":
            raise InputError(
                " ".join(said), "code on the command line has no file, so its lines cannot be named", _WRITE
            )
        if option in _PYTHON_OPTIONS_WITH_VALUE and words:
            words.pop(0)
    if not words:
        raise InputError(" ".join(("--", *said)), "there is no script to trace", _WRITE)
    return ScriptCommand(target=words[0], args=tuple(words[1:]))


def _options(words: list[str], flags: set[str]) -> _Parsed:
    """Yields a launcher's own options, up to the script."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        key = name.replace("_", "-")
        if equals:
            options[key] = value
        elif key in {flag.replace("_", "-") for flag in flags} or not words:
            options[key] = ""
        else:
            options[key] = words.pop(0)
    return _Parsed(options=options, rest=tuple(words))


def _accelerate(words: list[str], said: Sequence[str]) -> ScriptCommand:
    """The command for accelerate's own launcher, which takes its options apart."""
    if not words:
        raise InputError(" ".join(("--", *said)), "there is no script to trace", _WRITE)
    return ScriptCommand(target="accelerate", launcher="accelerate", args=tuple(words))


def _torchrun(words: list[str], said: Sequence[str]) -> ScriptCommand:
    parsed = _options(words, _TORCHRUN_FLAGS)
    per_node = _count(parsed.options, "nproc-per-node")
    nodes = _count(parsed.options, "nnodes")
    return _launched(parsed, said, per_node * nodes, per_node, is_module={"m", "module"} & parsed.options.keys())


def _deepspeed(words: list[str], said: Sequence[str]) -> ScriptCommand:
    parsed = _options(words, _DEEPSPEED_FLAGS)
    per_node = _count(parsed.options, "num-gpus")
    included = parsed.options.get("include", "").rpartition(":")[2]
    per_node = len(included.split(",")) if included else per_node
    nodes = _count(parsed.options, "num-nodes")
    command = _launched(parsed, said, per_node * nodes, per_node, is_module="module" in parsed.options)
    if "no-local-rank" in parsed.options:
        return command
    return replace(command, args=("--local_rank=0", *command.args))


def _count(options: dict[str, str], name: str) -> int:
    """Parses a number of processes; ``gpu`` and ``auto`` mean all cards, of which a trace has one. Of a range of nodes,
    ``1:4``, the least counts.

    Raises:
        InputError: it is no number from 1 up.
    """
    text = options.get(name, "1").partition(":")[0]
    if text in _ALL:
        return 1
    if not text.isdecimal() or not int(text):
        raise InputError(f"--{name} {text}".rstrip(), "not a number of processes", f"write --{name} 2, or leave it out")
    return int(text)


def _launched(
    parsed: _Parsed, said: Sequence[str], world: int, per_node: int, *, is_module: object
) -> ScriptCommand:  # fmt: skip
    if not parsed.rest:
        raise InputError(" ".join(("--", *said)), "there is no script to trace", _WRITE)
    return ScriptCommand(
        target=parsed.rest[0], is_module=bool(is_module), args=parsed.rest[1:], world=world,
        environment=torchrun_variables(world, per_node),
    )  # fmt: skip


def torchrun_variables(world: int, per_node: int | None = None, rank: int = 0) -> dict[str, str]:
    """The environment variables by which torchrun tells a process its rank."""
    local = per_node or world
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank % local), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def _check_interpreter(python: str) -> None:
    """Refuses another interpreter than memfit's own: packages of another environment cannot be imported."""
    if "/" not in python or not Path(python).exists():
        return
    if Path(python).absolute().parent.resolve() != Path(sys.executable).absolute().parent.resolve():
        raise InputError(
            python, f"a trace runs in memfit's own Python, {sys.executable}", "install memfit in that environment too"
        )


def _checked(command: ScriptCommand) -> ScriptCommand:
    if command.launcher or command.is_module:
        return command
    path, given = Path(command.target), f"script {command.target!r}"
    if not path.is_file():
        raise InputError(given, "a folder" if path.is_dir() else "no such file", "write the path of a Python script")
    if path.suffix == ".ipynb":
        raise InputError(
            given, "a notebook", f"write jupyter nbconvert --to script {path.name}, and name what it makes"
        )
    return command
