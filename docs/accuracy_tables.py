"""Tables and paragraphs of docs/accuracy.md, from bench/results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs.results import percent, result, table

ERRORS = ("median", "mean", "p90", "p95", "within_5_percent", "worst_under", "coverage")
ERROR_NAMES = ("median", "mean", "p90", "p95", "within 5 %", "worst under-prediction", "in interval")


def _errors(row: Mapping[str, Any]) -> list[str]:
    return [percent(row[name], 1 if name in ("within_5_percent", "worst_under", "coverage") else 2) for name in ERRORS]


def accuracy_halves() -> str:
    found = result("accuracy")
    halves = (("held-out half", "gpumemnet"), ("fitting half", "gpumemnet_fitting_half"))
    rows = ([name, found[key]["models"], found[key]["runs"], *_errors(found[key])] for name, key in halves)
    return table(["", "models", "runs", *ERROR_NAMES], rows)


def accuracy_kinds() -> str:
    rows = ([kind, row["models"], row["runs"], *_errors(row)] for kind, row in result("accuracy")["families"].items())
    return table(["kind of net", "models", "runs", *ERROR_NAMES], rows)


def accuracy_rules() -> str:
    names = ("median", "mean", "p90", "p95", "within_5_percent", "worst_under")
    rows = (
        [rung["rule"], rung["constant_mib"], *(percent(rung[name], 1) for name in names)]
        for rung in result("accuracy")["ladder"]["rungs"]
    )
    return table(["rule", "constant, MiB", *ERROR_NAMES[:-1]], rows)


def accuracy_workspace() -> str:
    names = ("median", "p90", "p95", "within_5_percent")
    rows = (
        [f"{row['factor']:g}", row["constant_mib"], *(percent(row[name], 1) for name in names)]
        for row in result("accuracy")["convolution_workspace"]
    )
    return table(["factor", "constant, MiB", "median", "p90", "p95", "within 5 %"], rows)


def accuracy_summary() -> str:
    found = result("accuracy")
    held = found["gpumemnet"]
    runs = found["gpumemnet"]["runs"] + found["gpumemnet_fitting_half"]["runs"]
    models = found["gpumemnet"]["models"] + found["gpumemnet_fitting_half"]["models"]
    return (
        f"{runs:,} measured runs of {models} timm models on an A100 40 GB were compared with their predictions. On the "
        f"half of the models that nothing was fitted on, the median error of the process's bytes is "
        f"{percent(held['median'], 1)} %, the 90th percentile {percent(held['p90'], 1)} %, and "
        f'{percent(held["fits_right"], 1)} % of the answers to "does it fit?" are right.'
    )


def accuracy_verdicts() -> str:
    held, fitted = (result("accuracy")[name] for name in ("gpumemnet", "gpumemnet_fitting_half"))
    return (
        f"Of the runs that ran and those that did not fit, {percent(held['fits_right'], 1)} % are predicted right "
        f"(fitting half: {percent(fitted['fits_right'], 1)} %). Among runs whose need is more than 5 % away from the "
        f"card's memory, {percent(held['verdicts_wrong_clear'])} % of the verdicts are wrong and "
        f'{percent(held["verdicts_close_clear"])} % are "close" (fitting half: '
        f"{percent(fitted['verdicts_wrong_clear'])} % and {percent(fitted['verdicts_close_clear'])} %)."
    )


def accuracy_cpu() -> str:
    rows = result("accuracy")["cpu"]
    exact = sum(row["traced_bytes"] == row["measured_bytes"] for row in rows)
    off = max(abs(row["with_scratch_bytes"] / row["measured_with_scratch_bytes"] - 1) for row in rows)
    return (
        f"On this CPU, {exact} of {len(rows)} phases of small nets (`tests/nets.py`) are predicted to the byte; with "
        f"the scratch memory inside operators, all are within {percent(off)} %."
    )
