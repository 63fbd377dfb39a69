"""predict --device all, max, cards and compare answer with the bytes of predict at the same setting, for four jobs.

python -m pytest tests/cli/test_equal_answers.py            small variants
python -m pytest tests/cli/test_equal_answers.py -m slow    the jobs as they are, and a small U-Net
"""

import json

import pytest

from memfit.cli import main

SMALL = {
    "f5": ("f5_tts/tiny",),
    "llama": ("examples/llama_lora.py:Llama8B", "layers=1", "width=512", "vocabulary=512"),
    "unet": ("examples/unet.py:Discs", "width=32", "size=16"),
    "gan": ("examples/gan.py:Waves", "samples=64"),
}
JOBS = {
    **{name: (job, "1GiB") for name, job in SMALL.items()},
    **{f"{name} as it is": ((job[0].replace("tiny", "base"),), "22GiB") for name, job in SMALL.items()},
}
"""(job and settings, the memory of its cards) by name."""
FAST = ("f5", "llama", "gan")
CARDS = ("t4", "rtx4090", "h100")
"""Cards that run three kinds of kernels."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in JOBS])
def asked(request, capsys, monkeypatch):
    """(a function from a verb and its arguments to the exit code and the answer, the memory of the cards)."""
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "0")
    (job, *settings), memory = JOBS[request.param]

    def ask(verb, *arguments):
        together = [",".join(settings)] if verb == "compare" and settings else settings  # one variant of the job
        pairs = [word for setting in together for word in ("--set", setting)]
        with pytest.raises(SystemExit) as ended:
            main([verb, job, *pairs, *arguments, "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out)

    return ask, memory, settings


def need(prediction):
    return max(phase["process_bytes"] for phase in prediction["phases"].values() if phase)


def test_cards_and_predict_of_several_devices(asked):
    ask, _, _ = asked
    devices = [word for card in CARDS for word in ("--device", card)]
    _, several = ask("predict", *devices)
    _, cards = ask("cards", *devices, "--no-largest")
    for card in cards["cards"]:
        _, alone = ask("predict", "--device", card["device"])
        together = several["devices"][card["device"]]
        assert together["phases"] == alone["phases"]
        assert card["process_bytes"] == need(alone)
        for key in ("fits", "verdict", "headroom_bytes", "limiting_phase"):
            assert card[key] == alone[key] == together[key]


def test_the_largest_micro_batches(asked):
    ask, memory, _ = asked
    limits = ("--device", "rtx4090", "--memory", memory)
    code, answer = ask("max", *limits)
    assert code in (0, 3)
    for result in answer["results"]:
        changes = [word for name, value in result["settings"].items() for word in ("--set", f"{name}={value}")]
        choices = (*changes, "--checkpoint", result["checkpoint"])
        if result["largest"] is None:
            assert ask("predict", *limits, *choices)[0] == 3
            continue
        items, length = result["shape"]["items"], result["shape"]["length"]
        suffix = f"x{length}" if length else ""
        code, alone = ask("predict", *limits, *choices, "--shape", f"{items}{suffix}")
        assert code == 0
        assert (result["process_bytes"], result["verdict"]) == (need(alone), alone["verdict"])
        assert result["headroom_bytes"] == alone["headroom_bytes"]
        assert result["exact"]
        assert ask("predict", *limits, *choices, "--shape", f"{items + 1}{suffix}")[0] == 3


def test_comparisons(asked):
    ask, _, settings = asked
    changes = {"checkpoint none": ("--checkpoint", "none"), "fp16": ("--precision", "fp16")} if not settings else {}
    _, compared = ask("compare", *(word for change in changes.values() for word in change), "--device", "rtx4090")
    first, *others = compared["subjects"]
    for subject in others:
        _, alone = ask("predict", "--device", "rtx4090", *changes.get(subject["name"].partition(" ")[2], ()))
        assert subject["phases"] == alone["phases"]
        assert subject["process_bytes"] == need(alone)
        assert subject["saves_bytes"] == first["process_bytes"] - need(alone)
