"""Tables and paragraphs of docs/accuracy.md, from bench/results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs.results import percent, result, table

ERRORS = ("median", "mean", "p90", "p95", "within_5_percent", "worst_under", "coverage")
ERROR_NAMES = ("median", "mean", "p90", "p95", "within 5 %", "worst under-prediction", "in interval")


REGULAR_NAMES = ("runs without trials", "their p95")


def _errors(row: Mapping[str, Any]) -> list[str]:
    return [percent(row[name], 1 if name in ("within_5_percent", "worst_under", "coverage") else 2) for name in ERRORS]


def _regular(row: Mapping[str, Any]) -> list[Any]:
    """Of the models none of whose readings shows trials of cuDNN."""
    return [row["regular_runs"], "-" if row["regular_p95"] is None else percent(row["regular_p95"])]


def accuracy_halves() -> str:
    halves_by_name = result("accuracy")
    halves = (("held-out half", "gpumemnet"), ("fitting half", "gpumemnet_fitting_half"))
    rows = (
        [name, halves_by_name[key]["models"], halves_by_name[key]["runs"], *_errors(halves_by_name[key]),
         *_regular(halves_by_name[key])]
        for name, key in halves
    )  # fmt: skip
    return table(["", "models", "runs", *ERROR_NAMES, *REGULAR_NAMES], rows)


def accuracy_kinds() -> str:
    rows = (
        [kind, row["models"], row["runs"], *_errors(row), *_regular(row)]
        for kind, row in result("accuracy")["families"].items()
    )
    return table(["kind of net", "models", "runs", *ERROR_NAMES, *REGULAR_NAMES], rows)


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


def workspace_rules() -> str:
    names = ("median", "p90", "shift")
    rows = (
        [row["rule"], *(percent(row[nets][name], 1) for nets in ("low", "right") for name in names)]
        for row in result("convolution_workspaces")["rules"]
    )
    header = [f"{nets}: {name}" for nets in ("too low", "right") for name in ("median", "p90", "shift")]
    return table(["workspaces", *header], rows)


def workspace_nets() -> str:
    """The low nets, and one that is predicted right, at their largest batches."""
    figures = result("convolution_workspaces")
    nets = {*figures["low_nets"], "ese_vovnet39b"}
    rules = [row["rule"] for row in figures["rules_sampled"]]
    largest = {row[0]: row for row in sorted(figures["rows"], key=lambda row: row[1]) if row[0] in nets}
    rows = (
        [net, batch, round(measured), *(percent(predicted / measured - 1, 1) for predicted in others[-len(rules) :])]
        for net, batch, measured, *others in sorted(largest.values())
    )
    return table(["net", "batch", "measured, MiB", *rules], rows)


def workspace_sample() -> str:
    """Each of the few rules on the fair sample."""
    parts = [
        f"{row['rule']} {percent(row['median'], 1)} and {percent(row['p90'], 1)} %"
        for row in result("convolution_workspaces")["rules_sampled"]
    ]
    runs = result("convolution_workspaces")["rules_sampled"][0]["runs"]
    return f"Median and 90th percentile on {runs} runs of a fair sample: {'; '.join(parts)}."


def workspace_effect() -> str:
    names = ("median", "p90", "margin_alone", "with_twice")
    rows = (
        [_range(row), "fitting" if row["fitting_half"] else "held-out", row["nets"], row["runs"],
         *(percent(row[name], 1) for name in names)]
        for row in result("convolution_workspaces")["by_effect_sampled"]
    )  # fmt: skip
    header = ["effect, %", "half", "nets", "runs", "median", "p90", "in the margin alone", "in the interval"]
    return table(header, rows)


def _range(row: Mapping[str, Any]) -> str:
    low, high = row["effect_from"], row["effect_to"]
    if low is None:
        return f"under {percent(high, 0)}"
    return f"over {percent(low, 0)}" if high is None else f"{percent(low, 0)} to {percent(high, 0)}"


def workspace_low_nets() -> str:
    rows = [row for row in result("convolution_workspaces")["by_effect"] if row["effect_to"] is None]
    part = {
        name: percent(sum(row[name] * row["runs"] for row in rows) / sum(row["runs"] for row in rows), 1)
        for name in ("margin_alone", "with_twice")
    }
    runs, low = sum(row["runs"] for row in rows), percent(rows[0]["effect_from"], 0)
    return (
        f"Together with the two lists of nets above, {runs} runs have an effect over {low} %: {part['margin_alone']} % "
        f"of them are inside their kind's margin alone, {part['with_twice']} % inside the interval."
    )


def accuracy_summary() -> str:
    accuracy = result("accuracy")
    held = accuracy["gpumemnet"]
    runs = accuracy["gpumemnet"]["runs"] + accuracy["gpumemnet_fitting_half"]["runs"]
    models = accuracy["gpumemnet"]["models"] + accuracy["gpumemnet_fitting_half"]["models"]
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
        f"On this CPU, {exact} of {len(rows)} phases of small nets (`testing/nets.py`) are predicted to the byte; with "
        f"the scratch memory inside operators, all are within {percent(off)} %."
    )


def accuracy_recipes() -> str:
    """Published figures by script, card, precision and kind of net."""
    judged = result("recipes")
    head = ["rows of", "rows", "median", "p90", "p95", "worst under-prediction", "in interval", "parameters x 16",
            "MemTracker", "its rows"]  # fmt: skip
    groups = [("all", judged["recipes"])]
    for column in ("source", "card", "precision", "family", "metric", "grade"):
        groups += [(f"{column}: {value}", row) for value, row in judged["groups"][column].items()]
    names = ("median", "p90", "p95", "worst_under", "coverage", "parameters_x_16_median")
    cells = ([name, row["rows"], *(percent(row[key], 1) for key in names), *_mem_tracker(row)] for name, row in groups)
    return table(head, cells)


def _mem_tracker(row: dict[str, Any]) -> list[object]:
    """Its median, and of how many rows."""
    count = row["mem_tracker_rows"]
    return [percent(row["mem_tracker_median"], 1) if count else "", count]


def accuracy_without_recipes() -> str:
    """Published figures that no recipe builds, by the reason."""
    why = result("recipes")["why_without"]
    return table(
        ["rows", "why there is no recipe"],
        ([rows, text] for text, rows in sorted(why.items(), key=lambda item: -item[1])),
    )


def accuracy_xmem() -> str:
    """xMem's runs: memfit beside the four estimators whose figures the runs' files have, and those that were run."""
    judged = result("xmem")["xmem"]
    rows = []
    for key, name in (("memfit", "memfit"), ("xmem", "xMem"), ("dnnmem", "DNNMem"), ("schedtune", "SchedTune"),
                      ("llmem", "LLMem"), ("mem_tracker", "torch's MemTracker"), ("accelerate", "Accelerate's"),
                      ("deepspeed_zero2", "DeepSpeed's, ZeRO-2"), ("parameters_x_16", "parameters x 16")):  # fmt: skip
        count = judged["rows"] if key == "memfit" else judged[f"{key}_rows"]
        rows.append([name, count, *(percent(judged[f"{key}_{part}"], 1) for part in ("median", "p90"))])
    return table(["estimator", "runs", "median", "p90"], rows)


def accuracy_first_reading() -> str:
    """What half of the weights changes, which the first reading of a convolution net may have."""
    judged = result("xmem")["xmem"]
    median, p90 = (percent(judged[f"memfit_{name}_from_empty"], 1) for name in ("median", "p90"))
    return (
        "Of convolution nets, the first NVML reading may already have part of the weights, since the trainer copies "
        "them while the thread that reads is still starting: the measured figure is too small by up to their size. The "
        f"prediction takes half of them. Without that, the median is {median} % and the 90th percentile {p90} %."
    )


def accuracy_xmem_families() -> str:
    """xMem's runs by card and kind of net."""
    groups = result("xmem")["groups"]
    rows = [
        [value, row["rows"], *(percent(row[key], 1) for key in ("memfit_median", "memfit_p90", "xmem_median",
                                                               "xmem_p90", "coverage"))]
        for column in ("card", "family") for value, row in groups[column].items() if row["rows"]
    ]  # fmt: skip
    return table(["runs of", "runs", "median", "p90", "xMem's median", "xMem's p90", "in interval"], rows)


def accuracy_timm_amp() -> str:
    """timm's benchmark under AMP on an RTX 3090."""
    judged = result("timm_amp")
    groups = [("all", judged["timm_amp"])]
    for column in ("torch", "layout", "family"):
        groups += [(f"{column}: {value}", row) for value, row in judged["groups"][column].items()]
    names = ("ran_fits", "failed_does_not", "failed_does_not_or_close", "clear_wrong")
    head = ["rows of", "rows", "ran, said to fit", "failed, said not to fit", "or close", "clear verdicts wrong"]
    return table(
        head,
        (
            [name, row["rows"], *("-" if row[key] is None else percent(row[key], 1) for key in names)]
            for name, row in groups
        ),
    )


def accuracy_timm_amp_again() -> str:
    """The same limits of other nets."""
    judged = result("timm_amp_again")
    shares = judged["timm_amp"]
    return (
        f"Another sample, of {judged['sample']} nets and {shares['rows']} rows (`--sample {judged['sample']} --seed "
        f"{judged['seed']}`): {percent(shares['ran_fits'], 1)} % of what ran is said to fit, "
        f"{percent(shares['failed_does_not'], 1)} % of what failed is said not to fit, "
        f"{percent(shares['failed_does_not_or_close'], 1)} % not to fit or to be close, and "
        f"{percent(shares['clear_wrong'], 1)} % of the clear verdicts are wrong."
    )


def accuracy_others() -> str:
    recipes, xmem, timm = result("recipes")["recipes"], result("xmem")["xmem"], result("timm_amp")["timm_amp"]
    return (
        f"On other cards and in half precision, nothing was fitted. {xmem['rows']} runs of xMem on an RTX 3060, an RTX "
        f"4060 and an A100 (fp32): median error {percent(xmem['memfit_median'], 1)} %, 90th percentile "
        f"{percent(xmem['memfit_p90'], 1)} %; xMem's own estimates of the same runs have "
        f"{percent(xmem['xmem_median'], 1)} and {percent(xmem['xmem_p90'], 1)} %. {recipes['rows']} published figures "
        f"in fp32, bf16 and fp16: median {percent(recipes['median'], 1)} %, 90th percentile "
        f"{percent(recipes['p90'], 1)} %. "
        f"{timm['rows']} limits of timm's benchmark under fp16 autocast on an RTX 3090: "
        f"{percent(timm['ran_fits'], 1)} % of the batches that ran are said to fit, "
        f"{percent(timm['failed_does_not_or_close'], 1)} % of those that failed are said not to fit or to be close."
    )
