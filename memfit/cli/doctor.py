"""memfit doctor: shows what is installed, what works, and how to mend the rest."""

from __future__ import annotations

from typing import Any

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import Exit


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Show versions, driver, cards, optional parts and folders, and run a self-test of a few seconds.

    Exit code 4: memfit cannot work here, or the self-test found a difference. A missing optional part is not a fault.
    """
    from memfit.cli.progress import progress

    report = _report()
    with progress("running the self-test", quiet=as_json):
        report["self_test"] = self_test() if report["torch"] is not None else _not_run("torch is not installed")
    report["problems"] = problems(report)
    report["ok"] = not report["problems"]
    if as_json:
        print_json(report)
    else:
        _show(report)
    return Exit.DONE if report["ok"] else Exit.CHECK_FAILED


def version_lines() -> list[str]:
    """The output of ``memfit --version``: memfit, torch and its build, Python, and each card."""
    from memfit.installation import memfit_version, python_version, torch_build

    build = torch_build()
    torch = f"torch {build.version} ({build.built_for} build)" if build is not None else "torch is not installed"
    cards = [f"card {card}" for card in _cards()] or ["no CUDA card"]
    return [f"memfit {memfit_version()}", torch, python_version(), *cards]


def self_test() -> dict[str, Any]:
    """Runs the self-test; returns {ok, text, differences, seconds}."""
    from memfit.trace.self_test import run

    result = run()
    text = f"passed in {result.seconds:.1f} s" if result.passed else "; ".join(result.differences)
    return {
        "ok": result.passed, "text": text, "differences": list(result.differences), "seconds": result.seconds,
    }  # fmt: skip


def problems(report: dict[str, Any]) -> list[str]:
    """What keeps memfit from working, and how to mend each."""
    problem_lines = []
    if report["torch"] is None:
        problem_lines.append("torch is not installed: run pip install torch")
    for folder in report["folders"]:
        if not folder["writable"]:
            setting = "XDG_CACHE_HOME" if folder["purpose"] == "cache" else "TMPDIR"
            problem_lines.append(
                f"the {folder['purpose']} folder {folder['path']} cannot be written: {folder['why']}; "
                f"make room there or make it writable, or set {setting} to another folder"
            )
    if report["self_test"]["ok"] is False:
        problem_lines.append(f"the self-test found a difference: {report['self_test']['text']}")
    return problem_lines


def _report() -> dict[str, Any]:
    from dataclasses import asdict

    from memfit.device.hardware.process_limits import available_bytes, available_cores
    from memfit.installation import folders, memfit_version, optional_parts, python_version, torch_build, version_of

    build = torch_build()
    required = (
        "numpy",
        "scipy",
        "click",
        "rich",
        "safetensors",
        "tomli-w",
        "nvidia-ml-py",
        "psutil",
        "msgspec",
        "jinja2",
        "plotly",
    )
    return {
        "memfit": memfit_version(),
        "python": python_version(),
        "torch": asdict(build) if build is not None else None,
        "required": {name: version_of(name) for name in required},
        "driver": _driver(),
        "cards": _cards(),
        "cores": available_cores(),
        "available_bytes": available_bytes(),
        "optional": [{**asdict(part), "install": part.install} for part in optional_parts()],
        "folders": [asdict(folder) for folder in folders()],
    }


def _not_run(why: str) -> dict[str, Any]:
    return {"ok": None, "text": why}


def _driver() -> str | None:
    """The version of the NVIDIA driver; None if there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _cards() -> list[str]:
    from memfit.device.hardware.local_devices import local_devices
    from memfit.sizes import format_size

    return [f"{card.name}, {format_size(card.memory_bytes or 0)}" for card in local_devices() if card.is_cuda]


def _show(report: dict[str, Any]) -> None:
    from rich.markup import escape

    from memfit.show.console import make_console
    from memfit.sizes import format_size

    console = make_console()
    if report["ok"]:
        console.print("[bold green]memfit works here.[/]")
    for problem in report["problems"]:
        console.print(f"[bold red]Problem[/]: {escape(problem)}")
    build = report["torch"]
    lines = [
        ("memfit", report["memfit"]),
        ("torch", f"{build['version']}, {build['built_for']} build" if build else "not installed"),
        ("Python", report["python"]),
        ("driver", report["driver"] or "no NVIDIA driver"),
        ("cards", "; ".join(report["cards"]) or "no CUDA card"),
        ("machine", f"{report['cores']} cores, {format_size(report['available_bytes'])} free"),
        ("requires", ", ".join(f"{name} {version}" for name, version in report["required"].items())),
        *((f"{folder['purpose']} folder", _folder(folder)) for folder in report["folders"]),
        ("self-test", report["self_test"]["text"]),
    ]
    for name, text in lines:
        console.print(f"{name:<18}{escape(text)}", soft_wrap=True)
    console.print("\nOptional parts")
    for part in report["optional"]:
        console.print(f"{part['name']:<18}{escape(_part(part))}", soft_wrap=True)


def _folder(folder: dict[str, Any]) -> str:
    return f"{folder['path']}, {'writable' if folder['writable'] else 'not writable'}"


def _part(part: dict[str, Any]) -> str:
    there = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    if not part["missing"]:
        return there
    return f"{there + '; ' if there else ''}not installed: {', '.join(part['missing'])}; run {part['install']}"
