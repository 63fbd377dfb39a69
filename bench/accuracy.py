"""Predictions against what was measured: on the CPU, by others on their cards, and on cards of ours.

python -m bench.accuracy                              all sources; writes bench/results/accuracy.json
python -m bench.accuracy --data RUNS.csv --out F.json any table of runs in one of four formats, told by its columns:
    model,batch,measured_mib,naive_faketensor_mib                                        timm's train.py (GPUMemNet)
    model,layout,torch,img_size,batch_that_ran,next_size_that_failed                     timm's benchmark.py under AMP
    card,model,optimizer,batch,seq_or_image,zero_grad,measured_peak_bytes,oom,est_xmem…  xMem's runs
    source,card,model,config,batch,seq,precision,optimizer,metric,unit,value             figures, by bench/recipes
python -m bench.accuracy --fit                        derives the constants anew, on the fitting half alone

Libraries of the versions that runs used go into bench/.environments, and timm into bench/.timm (pip install --no-deps
--target), never into the environment. Nets that were traced before
are read from the cache, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from bench.accuracy_parts import fitting, further_sources, show  # noqa: E402
from bench.accuracy_parts.formats import format_of, judge  # noqa: E402
from bench.accuracy_parts.gpumemnet import DEVICE, Failed, Predicted, predict_all  # noqa: E402
from bench.accuracy_parts.ladder import by_factor, ladder  # noqa: E402
from bench.accuracy_parts.statistics import summary  # noqa: E402
from bench.accuracy_parts.table import Run, is_fitting_half, models_in_order, read_table  # noqa: E402
from bench.accuracy_parts.timm_job import VERSION, timm_folder  # noqa: E402
from bench.accuracy_parts.traces import cache_folder  # noqa: E402
from bench.result_file import HEADER, header  # noqa: E402
from memfit.device.hardware.catalogue import find_device  # noqa: E402
from memfit.errors import InputError  # noqa: E402

PUBLIC = ROOT.parent / "shared" / "data" / "gpumemnet_timm_a100_40gb.csv"
SOURCES = ("gpumemnet", "cpu", "published", "measured")
TABLES = {
    "timm_amp": PUBLIC.with_name("timm_rtx3090_amp_fits.csv"),
    "xmem": PUBLIC.with_name("xmem_runs.csv"),
    "recipes": PUBLIC.with_name("measured_public.csv"),
}
"""Further sources, each with a result file of its own."""
RESULTS = Path(__file__).parent / "results" / "accuracy.json"
console = Console(stderr=True, highlight=False)


def main() -> int:
    """Runs the benchmark; 2 where its input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a table of runs; with it, only these are predicted")
    parser.add_argument(
        "--out", type=Path, help="default, where all sources and models ran: bench/results/accuracy.json"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="0: in this process")
    parser.add_argument(
        "--models", "--sample", type=int, dest="models", metavar="N",
        help="only so many models, a fair sample; default: all of the table",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: %(default)s")
    parser.add_argument(
        "--sources", default=",".join(SOURCES),
        help=f"which of them, with commas; default: %(default)s; there are {', '.join(TABLES)} too",
    )  # fmt: skip
    parser.add_argument("--cache", type=Path, help="where traces are kept; default: a folder in ~/.cache/memfit")
    parser.add_argument(
        "--fit", action="store_true", help="write the constants and margins that the fitting half gives"
    )
    given = parser.parse_args()
    try:
        if given.data is not None and format_of(given.data) != "gpumemnet":
            return other_format(given.data, given.out, given.models, given.seed, given.workers)
        if given.data is not None or set(given.sources.split(",")) & set(SOURCES):
            install_timm()
        folder = given.cache or cache_folder()
        if given.data is not None:
            return predict_table(
                given.data, given.out or RESULTS.with_name("table.json"), folder, given.workers, given.models
            )
        if given.fit:
            fitting.write(predict(fitting.half(sample(read_table(PUBLIC), given.models)), folder, given.workers)[0])
        return everything(given.sources.split(","), given.out, folder, given.workers, given.models, given.seed)
    except InputError as error:
        console.print(error, style="red")
        return 2


def other_format(data: Path, out: Path | None, models: int | None, seed: int, workers: int) -> int:
    """``--data`` in a format other than GPUMemNet's. The file is written anew after each net, so that a run that is
    stopped leaves the part that it reached."""
    out = out or RESULTS.with_name(f"{format_of(data)}.json")
    for count, judged in enumerate(judge(data, models, seed, workers, _warn), 1):
        _write(out, judged.as_json() | {"sample": models, "seed": seed, "nets_so_far": count}, quiet=True)
    console.print(f"written to {out}")
    show.judged(judged.format, judged.statistics, judged.groups)
    return 0


def predict_table(data: Path, out: Path, folder: Path, workers: int, models: int | None) -> int:
    """``--data``: one table, none of whose runs was fitted to unless it is the public one."""
    rows, failed = predict(sample(read_table(data), models), folder, workers)
    answer = {"gpumemnet": _summary(rows), "families": by_family(rows), **_about(failed), "rows": _lines(rows)}
    _write(out, answer)
    show.table(f"{data.name}: runs of others, on {find_device(DEVICE).name}", answer["families"], _summary(rows))
    show.failures(failed)
    return 0


def everything(
    sources: Sequence[str], out: Path | None, folder: Path, workers: int, models: int | None, seed: int
) -> int:
    """One source after another; absent ones are named. Writes the result file where all ran, else only ``out``."""
    for name in sources:
        if name not in (*SOURCES, *TABLES):
            raise InputError(f"--sources {name}", "no source of that name", f"write {', '.join((*SOURCES, *TABLES))}")
    tables = [name for name in TABLES if name in sources]
    for name in tables:
        other_format(TABLES[name], RESULTS.with_name(f"{name}.json"), models, seed, workers)
    if set(sources) <= set(tables):
        return 0
    answer: dict[str, Any] = {}
    if "gpumemnet" in sources:
        answer |= _table_of_others(folder, workers, models)
    if "cpu" in sources:
        answer["cpu"] = further_sources.cpu_truth(console)
        show.cpu(answer["cpu"])
    if "published" in sources:
        answer["published"] = further_sources.published()
        show.published(answer["published"])
    if "measured" in sources:
        answer["measured"] = further_sources.measured(ROOT / "bench" / "measured", console)
        show.cards(answer["measured"])
    complete = set(sources) == set(SOURCES) and models is None and "gpumemnet" in answer
    if out is None and not complete:
        console.print("only a part of the sources ran: no file was written (--out F writes one)")
    else:
        _write(out or RESULTS, answer)
    return 0


def _table_of_others(folder: Path, workers: int, models: int | None) -> dict[str, Any]:
    if not PUBLIC.exists():
        console.print(f"{PUBLIC} is not there: no runs of others")
        return {}
    rows, failed = predict(sample(read_table(PUBLIC), models), folder, workers)
    held_out = [row for row in rows if not is_fitting_half(row.run.model)]
    fitted = [row for row in rows if is_fitting_half(row.run.model)]
    answer = {
        "gpumemnet": _summary(held_out),
        "gpumemnet_fitting_half": _summary(fitted),
        "families": by_family(held_out),
        "families_fitting_half": by_family(fitted),
        "ladder": ladder([row.run for row in held_out], folder, workers),
        "convolution_workspace": by_factor([row.run for row in fitted], folder, workers),
        **_about(failed),
        "rows": _lines(rows),
    }
    show.table("Runs of others, the half that nothing was fitted on", answer["families"], answer["gpumemnet"])
    show.table("The fitting half", answer["families_fitting_half"], answer["gpumemnet_fitting_half"])
    show.ladder(answer["ladder"])
    show.workspaces(answer["convolution_workspace"])
    show.failures(failed)
    return answer


def predict(runs: list[Run], folder: Path, workers: int) -> tuple[list[Predicted], list[Failed]]:
    """Every run of the table, with what could not be traced."""
    rows: list[Predicted] = []
    failed: list[Failed] = []
    models = len({run.model for run in runs})
    predictions = predict_all(runs, fitting.context_bytes(), folder, workers)
    for result in track(predictions, "predicting", total=models, console=console):
        if isinstance(result, Failed):
            failed.append(result)
        else:
            rows += result
    return sorted(rows, key=lambda row: (row.run.model, row.run.batch)), failed


def sample(runs: list[Run], models: int | None) -> list[Run]:
    """The runs of the first so many models, in an order by which every first part is a fair sample."""
    chosen = {name: place for place, name in enumerate(models_in_order(runs)[:models])}
    return sorted((run for run in runs if run.model in chosen), key=lambda run: (chosen[run.model], run.batch))


def by_family(rows: Sequence[Predicted]) -> dict[str, Any]:
    """Statistics by kind of net, the most frequent first."""
    kinds = [row.net_kind for row in rows]
    names = sorted(set(kinds), key=lambda kind: -kinds.count(kind))
    return {name: _summary([row for row in rows if row.net_kind == name]) for name in names}


def install_timm() -> None:
    """timm of the pinned version, without what it depends on, in a folder of the benchmark's own."""
    folder = timm_folder()
    if (folder / f"timm-{VERSION}.dist-info").exists():
        return
    console.print(f"installing timm {VERSION} into {folder}")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder)]
    done = subprocess.run([*command, f"timm=={VERSION}"], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise InputError(f"timm {VERSION}", reason, f"install it yourself: pip install --no-deps --target {folder} …")


def _summary(rows: Sequence[Predicted]) -> dict[str, Any]:
    return summary(rows, find_device(DEVICE).usable_bytes or 0)


def _about(failed: Sequence[Failed]) -> dict[str, Any]:
    return {
        "context_mib": fitting.context_bytes() >> 20,
        "timm": VERSION,
        "not_traced": {failure.model: failure.why for failure in failed},
    }


def _lines(rows: Sequence[Predicted]) -> list[list[Any]]:
    """model, batch, label, measured MiB, predicted MiB, low, high, fits, verdict."""
    return [
        [
            row.run.model, row.run.batch, row.run.label, row.run.measured_mib,
            *(nbytes >> 20 for nbytes in (row.process_bytes, row.low, row.high)), row.fits, row.verdict,
        ]
        for row in rows
    ]  # fmt: skip


def _warn(line: str) -> None:
    console.print(line, style="yellow", markup=False)


def _write(path: Path, answer: dict[str, Any], *, quiet: bool = False) -> None:
    answer = {**header(), **{key: value for key, value in answer.items() if key not in HEADER}}
    rows = answer.pop("rows", None)
    text = json.dumps(answer, indent=1)
    if rows is not None:
        text = text[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    if not quiet:
        console.print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
