"""memfit calibrate: measures this machine's context, workspaces and rates once, and keeps them."""

from __future__ import annotations

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import Exit, InputError


@click.command("calibrate")
@click.option("--device", "kind", type=click.Choice(["cpu", "cuda"]), help="Default: the first card, else the CPU.")
@json_option
def command(kind: str | None, as_json: bool) -> int:
    """Measure this machine's device and keep the figures for later predictions and plans.

    It measures operator rates by precision, copies and the cost of a call; on a GPU also its context and cuBLAS's
    workspace.
    """
    from dataclasses import asdict

    import torch

    from memfit.cli.progress import progress
    from memfit.device.hardware.calibrate import calibrate
    from memfit.device.hardware.calibration import keep_rates

    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda", "this machine has no CUDA device", "write --device cpu")
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    with progress(f"measuring {device.type}", quiet=as_json):
        measured = calibrate(device)
    try:
        path = keep_rates(measured)
    except OSError as error:
        raise InputError(
            f"the cache folder: {error.strerror}",
            "the figures cannot be kept",
            "set XDG_CACHE_HOME to the full path of a folder",
        ) from error
    if as_json:
        print_json({**asdict(measured), "file": str(path)})
    else:
        _show(asdict(measured), str(path))
    return Exit.DONE


def _show(figures: dict[str, object], path: str) -> None:
    from rich.table import Table

    from memfit.show.console import make_console
    from memfit.sizes import format_size

    console = make_console()
    threads = f", {figures['threads']} threads" if figures["threads"] else ""
    console.print(f"{figures['device']}{threads}, torch {figures['torch']}")
    table = Table(box=None, pad_edge=False)
    for title in ("", "fp32", "tf32", "bf16", "fp16"):
        table.add_column(title, justify="right" if title else "left")
    for title, name, unit in (
        ("matrix products, GFLOP/s", "matmul_flops", 1e9),
        ("convolutions, GFLOP/s", "convolution_flops", 1e9),
        ("attention, GFLOP/s", "attention_flops", 1e9),
        ("elementwise, GB/s", "elementwise_bytes", 1e9),
    ):
        row = figures[name]
        assert isinstance(row, dict)
        cells = (row.get(precision) for precision in ("fp32", "tf32", "bf16", "fp16"))
        table.add_row(title, *("-" if value is None else f"{value / unit:.4g}" for value in cells))
    console.print(table)
    for title, name in (
        ("copies in the host", "host_copy_bytes"),
        ("copies to the GPU", "copy_to_bytes"),
        ("copies from the GPU", "copy_from_bytes"),
    ):
        value = figures[name]
        if isinstance(value, float):
            console.print(f"{title}: {value / 1e9:.3g} GB/s")
    seconds = figures["call_seconds"]
    assert isinstance(seconds, float)
    console.print(f"a call: {seconds * 1e6:.2g} us")
    for title, name in (("context", "context_bytes"), ("cuBLAS workspace", "cublas_workspace_bytes")):
        value = figures[name]
        if isinstance(value, int):
            console.print(f"{title}: {format_size(value)}")
    console.print(f"Kept in {path}", soft_wrap=True)
