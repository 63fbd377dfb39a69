"""pytest tests/show/test_verify_table.py: the verdict first, in 80 columns."""

from types import SimpleNamespace

import pytest

from memfit.show.verify_table import show_verified

PLAN = SimpleNamespace(global_batch=11, unit="samples", micro_batch=3, job="tests/verify/jobs.py:Sound")


def world(number, ok, mesh=""):
    parts = dict.fromkeys(("loss", "gradients", "parameters"), 1e-7)
    return {
        "world": number, "engine": "ddp", "mesh": mesh, "ok": ok, "bound": 6e-7, "max_relative_difference": parts,
        "of_bounds": parts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ok", "first"), [(True, "The same on 1 and 2 ranks."), (False, "Not the same on 1 and 2 ranks.")]
)
def test_verdict_first_and_nothing_wider_than_80_columns(capsys, monkeypatch, ok, first):
    monkeypatch.setenv("COLUMNS", "80")
    finding = {"kind": "note" if ok else "fault", "code": "unsynchronised", "text": "net judge has other weights " * 8}
    by_name = {"ok": ok, "worlds": [world(1, True), world(2, ok)], "findings": [finding]}
    show_verified(by_name, PLAN)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first
    assert max(map(len, lines)) <= 80
    assert "\x1b[" not in "".join(lines)


def test_the_verdict_names_the_mesh(capsys):
    worlds = [world(1, True), world(4, True, "dp_replicate=2,dp_shard=2")]
    show_verified({"ok": True, "worlds": worlds, "findings": []}, PLAN)
    assert "The same on 1 and 4 ranks (dp_replicate=2,dp_shard=2)." in capsys.readouterr().out


def test_a_fault_of_the_job_is_not_called_a_difference(capsys):
    """A split changes what batch normalisation learns, and stages of a pipeline split nothing."""
    finding = {"kind": "fault", "code": "batch_norm", "text": "batch normalisation by local batches in net.1"}
    worlds = [world(1, True), world(2, True, "pp=2")]
    show_verified({"ok": False, "worlds": worlds, "findings": [finding]}, PLAN)
    assert capsys.readouterr().out.splitlines()[0] == "The same on 1 and 2 ranks (pp=2), with a fault: batch_norm."


def test_a_difference_without_end_is_no_number(capsys):
    apart = world(2, False)
    apart |= {name: {**apart[name], "loss": None} for name in ("max_relative_difference", "of_bounds")}
    show_verified({"ok": False, "worlds": [apart], "findings": []}, PLAN)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("2 ")]
    assert row.split("  ")[-1].strip() == "more than any"
    assert "not finite" in row
