"""pytest tests/show/test_mesh_table.py: meshes in the terminal."""

from memfit.mesh import MeshShape
from memfit.planner.mesh_search.mesh_row import CHOSEN, FITS, REFUSED, SLOWER, TOO_LARGE, MeshRow
from memfit.show.console import make_console
from memfit.show.mesh_table import SHOWN, show_meshes

ROWS = (
    MeshRow(mesh=MeshShape(dp_shard=64), engine="fsdp2", state=CHOSEN, seconds=1.5, peak=70 << 30, traced=True,
            arithmetic="64 = 64 devices x (1 x 1)", policy="everything kept"),
    MeshRow(mesh=MeshShape(dp_replicate=2, dp_shard=32), engine="fsdp2", state=FITS, seconds=1.6, peak=71 << 30,
            arithmetic="64 = 64 devices x (1 x 1)", policy="32 modules recomputed"),
    MeshRow(mesh=MeshShape(dp_shard=32, tp=2), engine="fsdp2", state=SLOWER, seconds=2.0),
    MeshRow(mesh=MeshShape(dp_replicate=64), engine="ddp", state=TOO_LARGE, peak=120 << 30, remark="state alone"),
    MeshRow(mesh=MeshShape(dp_shard=16, tp=4), engine="fsdp2", state=REFUSED, remark="no plan"),
    MeshRow(mesh=MeshShape(dp_shard=8, tp=8), engine="fsdp2", state=REFUSED, remark="no plan"),
)  # fmt: skip


def shown(rows):
    console = make_console()
    console.width = 160
    with console.capture() as capture:
        show_meshes(rows, console)
    return capture.get()


def test_each_mesh_says_what_is_known_of_it():
    lines = {line.split()[0]: " ".join(line.split()) for line in shown(ROWS).splitlines() if line.strip()}
    assert lines["dp_shard=64"].endswith("everything kept 70.00 GiB 1.5 s chosen, traced")
    assert lines["dp_replicate=2,dp_shard=32"].endswith("71.00 GiB 1.6 s fits, estimated")
    assert lines["dp_shard=32,tp=2"].endswith("- - - at least 2 s slower")
    assert lines["dp_replicate=64"].endswith("at least 120.00 GiB - does not fit, state alone")
    assert lines["Refused:"] == "Refused: dp_shard=16,tp=4 and 1 more: no plan"


def test_a_long_list_is_cut_and_says_where_the_rest_is():
    text = shown(ROWS[1:2] * (SHOWN + 3))
    assert text.count("dp_replicate=2") == SHOWN
    assert "and 3 more; --json lists all" in text
    assert shown(()) == ""
