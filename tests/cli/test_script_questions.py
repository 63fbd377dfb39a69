"""A script's command in place of a job: predict, max, cards, compare and ui answer with the bytes of memfit trace.

python -m pytest tests/cli/test_script_questions.py
"""

import json
import subprocess
import sys

import pytest

from memfit.cli import main

SCRIPT = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
given = parser.parse_args()
net = torch.nn.Sequential(torch.nn.Linear(given.width, given.width), torch.nn.BatchNorm1d(given.width)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(8):
    net(torch.randn(given.batch_size, given.width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
KEYS = ("allocated_bytes", "reserved_bytes", "process_bytes", "process_bytes_low", "process_bytes_high", "categories")


ASK = """
import sys
from memfit.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported torch" if "torch" in sys.modules else "without torch", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return ("--", "python", str(tmp_path / "train.py"))


def asked(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code, capfd.readouterr()


def phases(answer):
    return {name: {key: phase[key] for key in KEYS} for name, phase in answer["phases"].items() if phase}


def test_predict_answers_for_a_script_as_trace_does(capfd, script):
    _, traced = asked(capfd, "trace", "--device", "t4", "--json", "-", *script)
    code, predicted = asked(capfd, "predict", "--device", "t4", "--json", *script)
    assert code == 0
    assert phases(json.loads(predicted.out)) == phases(json.loads(traced.out))


def growing(folder, verb):
    """The words of a command whose memory grows in each of its many steps."""
    kept = (
        SCRIPT.replace("for _ in range(8)", "kept = []\nfor _ in range(1000)")
        + "    kept.append(torch.ones(4096, 64, device='cuda'))\n"
    )
    (folder / "train.py").write_text(kept)
    return ("--", "python", str(folder / "train.py"), *(("--batch-size", "{batch}") if verb == "max" else ()))


LARGEST = pytest.param(("max", "--device", "t4"), marks=pytest.mark.slow)
SEVERAL = ("predict", "--device", "t4", "h100")


@pytest.mark.parametrize("question", [("predict", "--device", "t4"), SEVERAL, ("cards", "--device", "t4"), LARGEST])
def test_a_script_that_needs_more_with_each_step_is_told_so_in_the_first_line(capfd, tmp_path, monkeypatch, question):
    monkeypatch.setenv("COLUMNS", "")
    code, said = asked(capfd, *question, *growing(tmp_path, question[0]))
    assert code == 0
    assert f"A longer run needs more: memory grows at {tmp_path}/train.py:15." in said.out.splitlines()[0]


@pytest.mark.parametrize(
    "question",
    [
        ("predict", "--device", "t4"),
        pytest.param(SEVERAL, marks=pytest.mark.slow),
        ("cards", "--device", "t4"),
        LARGEST,
    ],
)
def test_a_script_that_needs_more_with_each_step_is_told_so_in_json(capfd, tmp_path, question):
    code, said = asked(capfd, *question, "--json", *growing(tmp_path, question[0]))
    assert code == 0
    assert "a longer run needs more than predicted" in said.out


@pytest.mark.slow
def test_each_card_of_a_script_needs_what_predict_and_trace_say(capfd, script):
    code, compared = asked(capfd, "cards", "--device", "t4", "--device", "h100", "--json", *script)
    assert code == 0
    _, predicted = asked(capfd, "predict", "--device", "t4", "--device", "h100", "--json", *script)
    for card in json.loads(compared.out)["cards"]:
        _, traced = asked(capfd, "trace", "--device", card["device"], "--json", "-", *script)
        for known in (json.loads(traced.out), json.loads(predicted.out)["devices"][card["device"]]):
            assert card["process_bytes"] == max(phase["process_bytes"] for phase in known["phases"].values() if phase)
            assert (card["verdict"], card["headroom_bytes"]) == (known["verdict"], known["headroom_bytes"])


@pytest.mark.slow
def test_compare_takes_a_command_behind_each_dash(capfd, script):
    code, compared = asked(capfd, "compare", "--device", "t4", "--json", *script, *script, "--width", "512")
    assert code == 0
    first, second = json.loads(compared.out)["subjects"]
    _, traced = asked(capfd, "trace", "--device", "t4", "--json", "-", *script, "--width", "512")
    assert phases(second) == phases(json.loads(traced.out))
    assert second["saves_bytes"] == first["process_bytes"] - second["process_bytes"] < 0


@pytest.mark.slow
def test_the_largest_batch_needs_what_predict_says_and_the_next_does_not_fit(capfd, script):
    batch = (*script, "--batch-size", "{batch}")
    code, printed = asked(capfd, "max", "--device", "t4", "--memory", "256MiB", "--json", *batch)
    assert code == 0
    (result,) = json.loads(printed.out)["results"]
    assert result["exact"]
    asking = ("predict", "--device", "t4", "--memory", "256MiB", "--json", "--micro-batch")
    code, fits = asked(capfd, *asking, str(result["largest"]), *batch)
    assert code == 0
    need = max(phase["process_bytes"] for phase in json.loads(fits.out)["phases"].values())
    assert need == result["process_bytes"]
    assert asked(capfd, *asking, str(result["largest"] + 1), *batch)[0] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("max", "--device", "t4"), "write {batch} there"),
        (("predict", "--micro-batch", "4"), "write {batch} there"),
        (("predict", "--checkpoint", "all"), "leave --checkpoint out"),
        (("predict", "--engine", "ddp", "--world", "2"), "leave --engine out"),
        (("predict", "--mesh", "tp=2"), "leave --mesh out"),
        (("compare", "--set", "width=3"), "behind another --"),
        (("max", "--length"), "leave --length out"),
        (("ui", "--devices", "2"), "leave it out"),
        (("ui", "--set", "width=3"), "leave --set out"),
    ],
)
def test_options_of_jobs_are_refused_in_one_line(capfd, script, arguments, said):
    code, printed = asked(capfd, *arguments, *script)
    assert code == 2
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_a_page_of_a_command_with_several_ranks_is_refused_in_one_line(capfd, script):
    code, printed = asked(capfd, "ui", "--device", "t4", "--", "torchrun", "--nproc-per-node", "2", script[2])
    assert code == 2
    assert "it starts 2 ranks" in printed.err
    assert printed.err.count("\n") == 1


def test_a_script_that_fails_is_refused_in_one_line(capfd, tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    code, printed = asked(capfd, "predict", "--device", "t4", "--", "python", str(tmp_path / "train.py"))
    assert code == 2
    assert "ValueError: no data" in printed.err.splitlines()[-1]


SPARSE = """
import torch
net = torch.nn.Embedding(1000, 64, sparse=True)
for _ in range(4):
    net(torch.randint(1000, (8, 4))).square().mean().backward()
    net.weight.grad.log1p_()
"""
ON_CARD = "import torch\ntorch.nn.Linear(3, 3).to('cuda')\n"
FAILURES = {
    "sparse": (
        SPARSE,
        "write it dense: sparse=False in nn.Embedding and nn.EmbeddingBag, index_add for a sparse product",
    ),
    "a fault of the script": ("1 / 0\n", "correct the script"),
    "a card": (ON_CARD, "name a card: --device rtx4090"),
    "a question": ("input('epochs? ')\n", "a trace has no input; let the script take the answer from an argument"),
    "a file": (
        "open('data/train.jsonl')\n",
        "run it in the folder where the script finds that file, or put a small one of the same form there",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_script_that_fails_on_a_cpu_is_answered_by_what_mends_it(capfd, tmp_path, name):
    text, write = FAILURES[name]
    (tmp_path / "train.py").write_text(text)
    code, said = asked(capfd, "predict", "--device", "cpu", "--", "python", str(tmp_path / "train.py"))
    last = said.err.splitlines()[-1]
    assert code == 2
    assert last.endswith(f"; {write}")
    assert last.count("write it dense") == (name == "sparse")


def test_an_error_of_memfit_in_a_trace_says_once_what_to_write(capfd, tmp_path):
    (tmp_path / "train.py").write_text(SPARSE)
    _, said = asked(capfd, "trace", "--device", "cpu", "--", "python", str(tmp_path / "train.py"))
    assert (said.out + said.err).count("write it dense") == 1


def test_what_a_script_misses_is_told_with_a_command_that_has_the_option(capfd, tmp_path):
    (tmp_path / "train.py").write_text("import no_such_package")
    code, answer = asked(capfd, "predict", "--device", "t4", "--", "python", str(tmp_path / "train.py"))
    assert code == 2
    assert "write memfit trace --stub no_such_package" in answer.err


def test_a_command_goes_to_plan_as_to_the_others(capfd, script):
    code, planned = asked(capfd, "plan", "--device", "t4", "--json", *script)
    assert code == 0
    assert json.loads(planned.out)["devices"]["t4"]["options"]


@pytest.mark.parametrize("verb", ["run", "explain", "export", "verify", "lint", "probe"])
def test_a_verb_that_takes_no_script_says_which_do(capfd, script, verb):
    code, answer = asked(capfd, verb, *script)
    assert code == 2
    assert "a script's command goes with cards, compare, max, plan, predict, trace, ui; " in answer.err
    assert answer.err.count("\n") == 1


def test_lint_takes_files_behind_two_dashes(capfd, script):
    code, _ = asked(capfd, "lint", "--", script[-1])
    assert code == 0


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *((verb, name) for verb in ("predict", "trace", "cards") for name in ("train.py", "other.py")),
        ("max", "other.py"),
        pytest.param("max", "train.py", marks=pytest.mark.slow),
    ],
)
def test_who_asks_of_a_script_waits_for_no_import_of_torch(script, verb, name):
    command = [
        *script[:2],
        script[2].replace("train.py", name),
        *(["--batch-size", "{batch}"] if verb == "max" else []),
    ]
    run = [sys.executable, "-c", ASK, verb, "--device", "t4", *command]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == (0 if name == "train.py" else 2), done.stderr
    assert done.stderr.endswith("without torch\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python"], "there is no script to trace"),
        (["--", "python", "-c", "pass"], "code on the command line has no file"),
        (["--", "bash", "run.sh"], "'bash' is not a Python script"),
        (["python", "train.py", "--lr", "1"], "write memfit predict --device t4 -- python train.py --lr 1"),
        (["torchrun", "-m", "train"], "write memfit predict --device t4 -- torchrun -m train"),
    ],
)
def test_a_command_that_runs_no_script_or_lacks_the_dashes_is_told_what_to_write(capfd, words, said):
    code, answer = asked(capfd, "predict", "--device", "t4", *words)
    assert (code, answer.err.count("\n")) == (2, 1)
    assert said in answer.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("import os; os._exit(7)", "ended with code 7"),
        ("import sys; sys.exit(2)", "(the script exited with 2); correct what the script says above"),
        ("print('trained nothing')", "it made no optimizer steps, and a prediction"),
    ],
)
def test_a_script_without_an_answer_is_told_how_it_ended(capfd, tmp_path, text, said):
    (tmp_path / "train.py").write_text(text)
    code, answer = asked(capfd, "predict", "--device", "t4", "--", "python", str(tmp_path / "train.py"))
    assert code == 2
    assert said in answer.err
