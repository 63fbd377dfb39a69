"""The report of an audit: its findings, the counts of every world, and what each rank was given."""

from __future__ import annotations

from memfit.audit import Audit
from memfit.show.page import Page, Section, Table
from memfit.show.report_run import strips_of

COLUMNS = 64


def audit_report(audit: Audit, target: str) -> Page:
    """An audit of ``target``."""
    codes = sorted({finding.code for finding in audit.findings})
    worlds = ", ".join(map(str, audit.counts))
    verdict = f"Faults: {', '.join(codes)}" if codes else "No fault found; what is repeated or missing is counted below"
    findings = [
        {"title": f"{f.code}, {_ranks(f.world)}", "text": f.text.replace(f.cure, "").strip(), "cure": f.cure}
        for f in audit.findings
    ]
    strips = [strips_of(audit.picture(world, COLUMNS), _ranks(world)) for world in audit.counts]
    text = (
        "One epoch. A bar's height is the part of the ids there that the rank is given: "
        "full bars of “all” mean that every sample is seen."
    )
    sections = [
        *([Section(title="What is wrong", findings=findings)] if findings else []),
        Section(title="Counts of one epoch", tables=[_counts(audit)]),
        Section(title="What each rank is given", text=text, strips=strips),
    ]
    return Page(
        title=f"audit of {target}",
        verdict=verdict,
        tone="bad" if codes else "good",
        sections=sections,
        about=[f"{audit.dataset_size:,} samples", f"worlds of {worlds} ranks"],
    )


def _counts(audit: Audit) -> Table:
    columns = (
        "ranks",
        "batches a rank",
        "distinct",
        "repeats",
        "missing",
        "new order each epoch",
        "optimizer steps",
        "padding",
        "imbalance",
    )
    rows = []
    for row in audit.to_json()["worlds"]:
        batches = sorted(set(row["batches_per_rank"]))
        fractions = (
            "unknown" if row[name] is None else f"{row[name]:.1%}" for name in ("padding_fraction", "imbalance")
        )
        steps = row["optimizer_steps"]
        given = "–".join(f"{n:,}" for n in dict.fromkeys((batches[0], batches[-1])))
        order = {True: "yes", False: "no", None: "unknown"}[row["order_changes_each_epoch"]]
        rows.append(
            (
                str(row["world"]),
                given,
                f"{row['distinct']:,}",
                f"{row['duplicates']:,}",
                f"{row['missing']:,}",
                order,
                "unknown" if steps is None else f"{steps:,}",
                *fractions,
            )
        )
    return Table(
        caption="What all ranks of a world are given together", columns=columns, rows=rows, numeric=columns[1:]
    )


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"
