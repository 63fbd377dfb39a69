"""memfit trace: runs a training script unmodified on the virtual card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memfit.errors import Exit, InputError, unwritable

PLACEHOLDER = "{batch}"


@click.command("trace", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("words", metavar="-- COMMAND ARGS", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--device", "devices", multiple=True, metavar="CARD",
    help="A card of the catalogue (memfit devices), or cpu; may be repeated. Default: every card, by the kernels of "
    "an A100.",
)  # fmt: skip
@click.option(
    "--memory", metavar="SIZE",
    help="Replace the card's memory and enforce it: a larger request raises torch.OutOfMemoryError in the script.",
)  # fmt: skip
@click.option(
    "--steps", metavar="N", help="Stop after N steps of every optimizer. Default: stop when every phase was seen."
)
@click.option("--batches", metavar="K", help="Cut each pass over a DataLoader to K batches. Default: 4.")
@click.option("--limit", metavar="TIME", default="10m", show_default=True, help="Stop after this time: 90s, 10m, 1h.")
@click.option("--world", metavar="W", help="Ranks of the process group. Default: the launcher's, else 1.")
@click.option("--rank", metavar="R", default="0", show_default=True, help="The rank that is traced.")
@click.option(
    "--batch", metavar="A,B,C",
    help=f"Sizes to trace for the largest batch if the command has {PLACEHOLDER}. Default: 2,3,5.",
)  # fmt: skip
@click.option(
    "--assume", multiple=True, metavar="FILE:LINE=VALUE", help="The answer to a line that reads a tensor's value."
)
@click.option(
    "--stub", "stubs", multiple=True, metavar="PKG", help="Import a stand-in for a package that is not installed."
)
@click.option(
    "--allow-write", "writable", multiple=True, metavar="DIR", help="Let the script really write into this folder."
)
@click.option(
    "--unsafe-writes", is_flag=True, help="Run without the sandbox: writes are real, and the network is open."
)
@click.option(
    "--host-memory", metavar="SIZE", help="Host memory that the script may take. Default: most of what is free."
)
@click.option("--json", "json_file", metavar="F", help="Write the answer as JSON; - is standard output.")
@click.option("--report", "report_file", metavar="F.html", help="Write the report, one HTML file.")
@click.option("--snapshot", "snapshot_file", metavar="F", help="Write the timeline for PyTorch's memory_viz.")
@click.option(
    "--trace", "trace_file", metavar="F", help="Write the events: F.json for ui.perfetto.dev, F.npz for memfit."
)
def command(words: tuple[str, ...], **options: Any) -> int:
    """Show how much memory COMMAND needs, phase by phase and line by line, and on which cards it fits.

    COMMAND is what you type to train: python train.py ARGS, python -m package, torchrun, accelerate launch or
    deepspeed. The script runs unmodified for a few steps, with tensors that have no bytes in place of those on the
    card. What it writes is thrown away.
    """
    from memfit.script.batch_scan import scan_batches
    from memfit.script.launch import trace_with_need
    from memfit.show.script_table import largest_batch, show_devices, show_outcome

    has_placeholder = any(PLACEHOLDER in word for word in words)
    if options["batch"] and not has_placeholder:
        raise InputError(
            f"--batch {options['batch']}", "the command has no place for the batch",
            f"write {PLACEHOLDER} there, as in --batch-size {PLACEHOLDER}",
        )  # fmt: skip
    sizes = _sizes(options["batch"] or "2,3,5")
    _check_files(options)
    requests = [_request(words, device, options) for device in options["devices"] or (None,)]
    outcomes, scans = [], []
    quiet = options["json_file"] == "-"
    for request in requests:
        if has_placeholder:
            scan = scan_batches(request, sizes)
            scans.append(scan)
            outcomes.append(scan.outcome)
        else:
            outcomes.append(trace_with_need(request))
    answer = _json(requests, outcomes, scans)
    _write_files(options, requests[0], outcomes[0])
    if options["json_file"]:
        _write_json(options["json_file"], answer)
    if not quiet:
        if len(requests) > 1:
            show_devices(requests, outcomes)
            for scan in scans[1:]:
                click.echo(largest_batch(scan))
        show_outcome(requests[0], outcomes[0], scans[0] if scans else None)
    return _exit_code(requests, outcomes)


def _sizes(text: str) -> tuple[int, ...]:
    from memfit.cli.options import whole_number

    sizes = tuple(whole_number("--batch", part) for part in text.split(","))
    if len(sizes) < 3 or len(set(sizes)) < len(sizes) or min(sizes) < 2:
        raise InputError(
            f"--batch {text}", "it takes three different sizes from 2 up: PyTorch treats a size of 1 apart",
            "write --batch 2,3,5",
        )  # fmt: skip
    return sizes


def seconds_of(text: str) -> float:
    """Parses a time such as 90s, 10m or 1h into seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InputError(
            f"--limit {text}", "not a time of more than 0 s and less than 10^6 s", "write a time such as 90s, 10m or 1h"
        )
    return seconds


def _request(words: tuple[str, ...], device: str | None, options: dict[str, Any]) -> Any:
    from dataclasses import replace

    from memfit.cli.options import whole_number
    from memfit.device.hardware.catalogue import find_device
    from memfit.device.hardware.process_limits import check_fake_ranks
    from memfit.script.command import parse_command, torchrun_variables
    from memfit.script.launch import DEFAULT_CARD, free_host_bytes
    from memfit.script.outcome import TraceRequest
    from memfit.sizes import parse_size

    command = parse_command(words)
    world, rank = whole_number("--world", options["world"]), whole_number("--rank", options["rank"], least=0)
    world = world or command.world
    check_fake_ranks(f"--world {world}" if options["world"] else f"{world} ranks of {' '.join(words)}", world)
    if rank >= world:
        raise InputError(f"--rank {rank}", f"there are ranks 0 to {world - 1}", f"write --rank {world - 1} or less")
    if world > 1 or rank or command.world > 1:
        local = int(command.environment.get("LOCAL_WORLD_SIZE", world))
        environment = command.environment | torchrun_variables(world, min(local, world), rank)
        command = replace(command, environment=environment, world=world)
    key = device if device == "cpu" else find_device(device).key if device else DEFAULT_CARD
    memory = options["memory"]
    return TraceRequest(
        command=command,
        device=key,
        memory_bytes=parse_size(memory, "--memory") if memory else None,
        enforced=memory is not None,
        asked=device is not None or memory is not None,
        steps=whole_number("--steps", options["steps"]),
        batches=whole_number("--batches", options["batches"]),
        limit_seconds=seconds_of(options["limit"]),
        rank=rank,
        stubs=options["stubs"],
        assumed=tuple(_assumption(text) for text in options["assume"]),
        writable=tuple(_folder(text) for text in options["writable"]),
        unsafe_writes=options["unsafe_writes"],
        host_bytes=parse_size(options["host_memory"], "--host-memory") if options["host_memory"] else free_host_bytes(),
    )


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise InputError(f"--allow-write {text}", "no such folder", "write the path of a folder that is there")
    return str(Path(text).resolve())


def _assumption(text: str) -> tuple[str, int, str]:
    place, equals, value = text.partition("=")
    file, colon, line = place.rpartition(":")
    if not (equals and colon and line.isdigit() and file and value):
        raise InputError(f"--assume {text}", "not a place and a value", "write --assume train.py:120=4")
    try:
        complex(value) if value not in ("True", "False") else None
    except ValueError:
        raise InputError(
            f"--assume {text}", f"{value!r} is neither a number nor True or False", "write --assume train.py:120=4"
        ) from None
    return file, int(line), value


def _check_files(options: dict[str, Any]) -> None:
    for name in ("json_file", "report_file", "snapshot_file", "trace_file"):
        path = options[name]
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise InputError(
                f"--{name.partition('_')[0]} {path}",
                "its folder is not there",
                "write a path in a folder that is there",
            )
    trace = options["trace_file"]
    if trace and Path(trace).suffix not in (".json", ".npz"):
        raise InputError(
            f"--trace {trace}", "neither .json nor .npz", "write F.json for ui.perfetto.dev, or F.npz for memfit report"
        )


def _write_files(options: dict[str, Any], request: Any, outcome: Any) -> None:
    if outcome.trace is None or outcome.footprint is None:
        return
    if options["snapshot_file"] or options["trace_file"] or options["report_file"]:
        from memfit.show.script_files import write_script_files

        write_script_files(
            request, outcome, report=options["report_file"], snapshot=options["snapshot_file"],
            trace=options["trace_file"],
        )  # fmt: skip


def _write_json(path: str, answer: dict[str, Any]) -> None:
    import json

    from memfit.atomic_file import write_atomic
    from memfit.cli.options import print_json

    if path == "-":
        print_json(answer)
        return
    try:
        write_atomic(path, json.dumps(answer, indent=2, default=str, allow_nan=False) + "\n")
    except OSError as error:
        raise unwritable(f"--json {path}", error) from error


def _json(requests: list[Any], outcomes: list[Any], scans: list[Any]) -> dict[str, Any]:
    from memfit.script.answer_json import answer_json

    answer = answer_json(requests[0], outcomes[0], scans[0] if scans else None)
    if len(outcomes) > 1:
        answer["devices"] = [
            answer_json(request, outcome, scans[number] if scans else None)
            for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True))
        ]
    return answer


def _exit_code(requests: list[Any], outcomes: list[Any]) -> int:
    """Returns 2 if the script failed, 4 if too little was seen, 3 if a named card is too small."""
    if any(outcome.error is not None and not outcome.error.out_of_memory for outcome in outcomes):
        return Exit.BAD_INPUT
    out_of_memory = any(outcome.error is not None and outcome.error.out_of_memory for outcome in outcomes)
    if not out_of_memory and any(outcome.footprint is None or outcome.windows < 2 for outcome in outcomes):
        return Exit.CHECK_FAILED
    if any(
        request.asked and not (outcome.footprint and outcome.footprint.fits)
        for request, outcome in zip(requests, outcomes, strict=True)
    ):
        return Exit.NOTHING_FITS
    return Exit.DONE
