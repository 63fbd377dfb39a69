"""memfit devices."""

import json
import subprocess
import sys

import pytest

from memfit.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["devices", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_table_fits_80_columns_and_names_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["rtx4090"] == ["rtx4090", "23.52", "23.50", "165.2", "165.2", "82.6", "1008", "PCIe", "4.0", "x16"]
    assert rows["t4"][3] == "unknown"
    assert "CPU," in out


def test_one_cards_figures_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "rtx4090")
    assert code == 0
    assert "23.52 GiB (25,250,627,584 B)" in out
    assert "NVIDIA Ada GPU architecture whitepaper (2022)" in out
    assert "nccl bytes              unknown" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_one_object_with_sources_and_null_for_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json")
    answer = json.loads(out)
    assert code == 0
    assert [card["name"] for card in answer["devices"]][:3] == ["t4", "rtx3090", "rtx4090"]
    assert answer["devices"][0]["bf16_flops"] is None
    assert answer["devices"][2]["sources"]["memory_bytes"].startswith("deviceQuery")
    assert answer["here"][-1]["name"] == "cpu"


def test_an_unknown_device_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "h1000")
    assert (code, out) == (2, "")
    assert err.startswith("memfit: device 'h1000': not one of t4")
    assert err.endswith("; write h100\n")
    assert err.count("\n") == 1


def test_a_card_can_be_added_once(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nname = "Mine"\ncompute_capability = [8, 6]\nmemory_bytes = 12884901888\n')
    code, out, err = run(capsys, "--add", str(own))
    assert (code, err) == (0, "")
    assert out.startswith("added mine: Mine, 12.00 GiB\n")
    assert "mine: Mine" in run(capsys, "mine")[1]
    code, _, err = run(capsys, "--add", str(own))
    assert code == 2
    assert "has that card" in err


def test_torch_is_not_imported() -> None:
    lines = (
        "import sys",
        "from memfit.cli import root",
        "root.main(['devices'], standalone_mode=False)",
        "sys.exit('torch' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True).returncode == 0
