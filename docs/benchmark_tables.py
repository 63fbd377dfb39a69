"""Tables of docs/benchmarks.md and docs/questions.md: memfit beside its peers, and seconds of second questions."""

from __future__ import annotations

from bench.result_file import RESULTS
from docs.results import result, table

MIB = 1 << 20


def peers() -> str:
    """Every estimator on every step, against the bytes that the step really took."""
    known, rows = result("peers"), []
    for row in known["rows"]:
        if row["bytes"] is None:
            answer, error = f"none: {row['why']}", ""
        else:
            answer, error = f"{row['bytes'] / MIB:,.1f}", f"{100 * row['error']:+.2f} %"
        seconds = row["processor_seconds"]
        spread = f"{seconds['median']:.1f} ({seconds['least']:.1f} to {seconds['most']:.1f})"
        tool = f"{row['tool']} {known['tools'][row['tool']]}" if row["tool"] != "memfit" else "memfit"
        measured = f"{row['measured_bytes'] / MIB:,.1f}"
        rows.append([row["work"], tool, measured, answer, error, spread, f"{row['peak_mib']:,.0f}"])
    head = ["step", "tool", "measured, MiB", "estimated, MiB", "error", "processor seconds", "memory of the tool, MiB"]
    return table(head, rows)


def batch_finders() -> str:
    """Every finder of the largest batch under one limit: what it found, whether that runs, and its trials."""
    if not (RESULTS / "batch_finders.json").exists():
        return "Not recorded yet."
    known, rows = result("batch_finders"), []
    for row in known["rows"]:
        name, seconds = row["finder"], row["processor_seconds"]
        tool = f"{name} {known['finders'][name]}" if name in known["finders"] and "memfit" not in name else name
        runs = {True: "yes", False: "no", None: row["why"]}[row["runs"]]
        batch = "none" if row["batch"] is None else f"{row['batch']:,}"
        spread = f"{seconds['median']:.1f} ({seconds['least']:.1f} to {seconds['most']:.1f})"
        rows.append([tool, batch, runs, row["trials"], row["failed_trials"], spread])
    machine = known["machine"]
    head = ["finder", "largest batch", "it runs", "trials", "failed trials", "processor seconds"]
    return f"{table(head, rows)}\n\nMeasured at a load of {machine['load']} on {machine['cores']} cores."


def second_questions() -> str:
    """The clock's seconds of second questions by job: right after the first question, and once the process of the
    background has ended: each one's first time, and the median of later ones."""
    known = result("second_questions")
    jobs = known["jobs"]
    head = ["question", *(f"`{job}`" for job in jobs)]
    rows = []
    for name in known["commands"]:
        if name == "first":
            continue
        cells = []
        for job in jobs:
            at_once, first = jobs[job]["at_once"][name]["clock"], jobs[job]["once_before"][name]["clock"]
            later = jobs[job]["second"][name]["clock"]["median"]
            cells.append(f"{at_once:.1f} s; {first:.1f} s, then {later:.1f} s")
        rows.append([name, *cells])
    first = ["the first question", *(f"{jobs[job]['first']['clock']:.1f} s" for job in jobs)]
    machine = known["machine"]
    return f"{table(head, [first, *rows])}\n\nMeasured at a load of {machine['load']} on {machine['cores']} cores."


def library_remedies() -> str:
    """What Lightning, Accelerate and Transformers do against failures of memory, beside memfit."""
    figures = result("library_remedies")
    last, failed, largest = figures["last_window"], figures["failed_step"], figures["largest_batch"]
    own, ours = failed["auto_find_batch_size"], failed["split_step"]
    difference = "largest difference of a weight to exact windows"
    rows = [
        [f"a last window of fewer micro-batches: {difference}", f"Lightning: {last['lightning']:.2g}",
         f"`ExactAccumulation`: {last['lightning_exact_accumulation']:.1g}"],
        [f"a last window of fewer micro-batches: {difference}", f"Accelerate: {last['accelerate']:.2g}",
         f"`memfit.accelerate.prepare`: {last['accelerate_guard']:.1g}"],
        ["a step that fails: largest difference of a weight to the undisturbed run",
         f"`auto_find_batch_size`: {own['difference']:.1g}, {own['windows_begun']} windows begun for 3",
         f"`SplitStep`: {ours['difference']:.1g}, {ours['windows_begun']} windows begun"],
    ]  # fmt: skip
    probe = largest["memfit_probe"]
    for mode in ("power", "binsearch"):
        finder = largest[f"batch_size_finder_{mode}"]
        rows.append(
            [f"the largest batch in {largest['budget']}",
             f"`BatchSizeFinder({mode})`: {finder['found']} in {len(finder['trials'])} trials",
             f"`memfit probe`: {probe['found']} in {len(probe['trials'])} trials"]
        )  # fmt: skip
    return table(["case", "the library's own", "memfit"], rows)
