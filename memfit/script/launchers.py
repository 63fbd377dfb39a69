"""Launchers that decide by themselves what they set: runs their own code to get the command that they would start."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

from memfit.device.virtual.patching import replaced
from memfit.errors import InputError
from memfit.script.command import parse_command, torchrun_variables
from memfit.script.outcome import ScriptCommand


class _StartedError(BaseException):
    def __init__(self, command: ScriptCommand) -> None:
        self.command = command


def resolved(command: ScriptCommand) -> ScriptCommand:
    """Returns the script that a launcher's arguments name, and the variables that the launcher sets."""
    if command.launcher != "accelerate":
        return command
    try:
        from accelerate.commands import launch
    except ModuleNotFoundError as error:
        raise InputError("accelerate launch", "accelerate is not installed", "pip install accelerate") from error
    import torch.distributed.run as distributed_run

    def start(words: list[str], env: dict[str, str]) -> Any:
        raise _StartedError(replace(parse_command(words), environment=_added(env)))

    def start_ranks(args: Any) -> None:
        nodes = int(str(args.nnodes).partition(":")[0])
        per_node = int(args.nproc_per_node) if str(args.nproc_per_node).isdigit() else 1
        words = (["-m"] if args.module else []) + [args.training_script, *args.training_script_args]
        command = parse_command(["python", *words])
        ranks = torchrun_variables(nodes * per_node, per_node)
        raise _StartedError(replace(command, environment=_added(dict(os.environ)) | ranks, world=nodes * per_node))

    subprocess = SimpleNamespace(**vars(launch.subprocess) | {"Popen": start})
    try:
        with replaced(launch, subprocess=subprocess), replaced(distributed_run, run=start_ranks):
            parser = launch.launch_command_parser()
            parser.error = _refuse
            launch.launch_command(parser.parse_args(list(command.args)))
    except _StartedError as started:
        environment = command.environment | started.command.environment
        return replace(started.command, environment=environment)
    raise InputError("accelerate launch", "it starts no script here", "write torchrun or python instead")


def _refuse(problem: str) -> NoReturn:
    """What the launcher's parser says of a mistake, without its help of a hundred lines."""
    write = "write accelerate launch OPTIONS train.py ARGS; accelerate launch --help names the options"
    raise InputError("accelerate launch", problem, write)


_before = dict(os.environ)


def _added(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables that a launcher added."""
    return {name: value for name, value in environment.items() if _before.get(name) != value}
