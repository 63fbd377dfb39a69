"""Counts the parameters of every built-in job and writes memfit/jobs/counts.json: python scripts/count_jobs.py."""

import json
from dataclasses import asdict
from pathlib import Path

from memfit.loading import built_in_jobs, load_job
from memfit.planner.predict import net_sizes, plain_nets


def counts() -> dict[str, dict]:
    """By job: its unit and its nets, as ``memfit jobs --json`` lists them."""
    jobs = {name: load_job(name) for name in sorted(built_in_jobs())}
    return {
        name: {"unit": job.unit, "nets": [asdict(size) for size in net_sizes(plain_nets(job))]}
        for name, job in jobs.items()
    }


def write(path: Path) -> None:
    """One job a line, so that a change shows as one."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in counts().items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "memfit" / "jobs" / "counts.json")
