"""Every mistake is one line, ``memfit: SEEN: WHY; WRITE``, on standard error, and exit code 2.

pytest tests/cli/test_bad_input.py
"""

import json
from pathlib import Path

import pytest

from memfit import errors
from memfit.apply.losses import WindowUnits, known_units
from memfit.apply.train_state import build
from memfit.cli import main
from memfit.errors import InputError, mistake_in_job
from memfit.jobs import f5_tts
from tests.cli.asking import AT, JOBS, RIGHT, Run, is_one_line, really
from tests.cli.wrong_jobs import NoRate

OPTIONS = {
    "a rule for an optimizer without a rate": (
        [
            "plan",
            f"{JOBS}:NoRate",
            "--device",
            "cpu",
            "--global-batch",
            "8",
            "--tuned-for",
            "4",
            "--learning-rate",
            "linear",
        ],
        ["no learning rate that can be multiplied", "--learning-rate none"],
    ),
    "no ranks": (["verify", RIGHT, "--world-sizes="], ["--world-sizes ''", "it is empty", "write --world-sizes N,N"]),
    "an empty engine": (["verify", RIGHT, "--engine", ""], ["--engine ''", "it is empty", "or leave it out"]),
    "only a comma": (["plan", RIGHT, "--global-batch", "8", "--keep", ","], ["--keep ','", "it is empty"]),
    "an empty one of several": (["max", RIGHT, "--device", "t4", "--device="], ["--device ''", "it is empty"]),
    "no such verb": (["predic", RIGHT], ["verb 'predic'", "write memfit predict"]),
    "a verb like no other": (["xyz"], ["verb 'xyz'", "not one of ", "devices, jobs", "see memfit --help"]),
    "no such option": (["predict", RIGHT, "--devise", "cpu"], ["option --devise", "write --device"]),
    "option of other verbs": (
        ["max", RIGHT, "--mesh", "tp=2"],
        ["option --mesh: it is an option of memfit predict, plan, verify, and not of memfit max", "leave it out"],
    ),
    "option of other verbs, but for a letter": (["predict", RIGHT, "--devices", "t4"], ["write --device"]),
    "no such option before the verb": (["--jsn", "devices"], ["option --jsn", "see memfit --help"]),
    "a script's command in one word": (
        ["max", "train.py --batch-size {batch}", "--device", "t4"],
        ["a script's command goes behind --", "write memfit max --device t4 -- python train.py --batch-size {batch}"],
    ),
    "several commands, each in one word": (
        ["compare", "train.py a", "torchrun train.py b"],
        ["write memfit compare -- python train.py a -- torchrun train.py b"],
    ),
    "a script without the name of a job": (
        ["predict", "train.py", "--device", "t4"],
        ["write train.py:Name, or, for a script, its command: -- python train.py"],
    ),
    "a micro-batch for plans": (
        ["compare", "a.toml", "b.toml", "--micro-batch", "3"],
        ["--micro-batch 3 for files alone", "a micro-batch of their own", "leave out --micro-batch, or name a job"],
    ),
    "a shape for plans and traces": (
        ["compare", "a.toml", "b.npz", "--shape", "3x40"],
        ["--shape 3x40 for files alone", "leave out --shape, or name a job"],
    ),
    "a device for traces": (
        ["compare", "a.npz", "b.npz", "--device", "t4"],
        ["--device t4 for trace files", "on its own device", "leave out --device, or name a job"],
    ),
    "ranks of no engine": (
        ["compare", RIGHT, "--device", "cpu", "--checkpoint", "all", "--world", "4"],
        ["--world 4 without --engine", "write --engine ddp too"],
    ),
    "a headroom for plans": (
        ["compare", "a.toml", "b.toml", "--headroom", "5%"],
        ["--headroom 5% for files alone", "a budget of its own", "write --device too"],
    ),
    "an option without its value": (
        ["predict", RIGHT, "--device"],
        ["memfit: --device: its value is", "write --device NAME"],
    ),
    "more seconds than a clock holds": (
        ["run", "no/plan.toml", "--out", "no/run", "--patience", "1e300"],
        ["--patience '1e300'", "not a number of seconds from 1 to 2147483647", "write --patience 300"],
    ),
    "a limit of years": (
        ["trace", "--limit", "99999h", "--", "python", "examples/gan.py"],
        ["--limit 99999h", "less than 10^6 s", "write a time such as 90s"],
    ),
    "no job": (["predict"], ["memfit: predict: JOB is missing"]),
    "one argument too many": (["predict", RIGHT, "more"], ["unexpected extra argument (more)"]),
    "no global batch": (["plan", RIGHT, "--device", "cpu"], ["--global-batch is missing", "write --global-batch N"]),
    "two devices where one is taken": (
        ["compare", RIGHT, "--device", "cpu", "--device", "t4"],
        ["--device twice", "memfit compare takes one", "write it once"],
    ),
    "a plan into a folder that is not there": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "8", "--out", "/proc/no/plan.toml"],
        ["--out /proc/no/plan.toml", "no folder /proc/no"],
    ),
    "a plan without a name": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "8", "--out", ""],
        ["--out ''", "it is empty"],
    ),
    "lengths for nothing": (["predict", RIGHT, "--device", "cpu", "--lengths", "f.csv:x"], ["write --epoch N too"]),
    "an unknown device": (["predict", RIGHT, "--device", "rtx409"], ["device 'rtx409'", "write rtx4090"]),
    "a device without a name": (["predict", RIGHT, "--device", ""], ["--device ''", "it is empty"]),
    "an unknown device of devices": (["devices", "h1000"], ["device 'h1000'", "write h100"]),
    "an unknown job of jobs": (["jobs", "f5_tts/bse"], ["job 'f5_tts/bse'", "write f5_tts/base"]),
    "a global batch of nothing": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "0"],
        ["--global-batch '0'", "1 or more"],
    ),
    "a global batch in words": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "many"],
        ["--global-batch 'many'"],
    ),
    "no devices": (["plan", RIGHT, "--device", "cpu", "--global-batch", "8", "--devices", "0"], ["--devices '0'"]),
    "more devices than samples": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "2", "--devices", "3"],
        ["--global-batch 2", "3 devices", "write 3 or more"],
    ),
    "a seed below zero": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "8", "--seed", "-5"],
        ["--seed '-5'", "0 or more"],
    ),
    "a plan that cannot be written": (
        ["plan", RIGHT, "--device", "cpu", "--global-batch", "8", "--out", "/proc/plan.toml"],
        ["plan file /proc/plan.toml", "cannot be written"],
    ),
    "audit of a file that is not there": (["audit", "none.py:loader"], ["target 'none.py:loader'", "no file none.py"]),
    "audit with a global batch in words": (["audit", "x.py:f", "--global-batch", "many"], ["--global-batch", "'many'"]),
}

VALUES = {
    "memory of nothing": (["--memory", "0"], ["--memory '0'", "write a size such as 24GiB"]),
    "memory of 0 GiB": (["--memory", "0GiB"], ["--memory '0GiB'", "more than nothing"]),
    "a unit that is none": (["--memory", "24 GBs"], ["--memory '24 GBs'", "not a number and a unit"]),
    "memory below zero": (["--memory", "-1GiB"], ["--memory '-1GiB'"]),
    "headroom below zero": (["--headroom", "-1"], ["--headroom '-1'", "not a number and a unit"]),
    "a budget of no unit": (["--budget", "1XB"], ["--budget '1XB'", "not a number and a unit"]),
    "memory that is not a number": (["--memory", "nan"], ["--memory 'nan'"]),
    "memory left empty": (["--memory", ""], ["--memory ''", "it is empty"]),
    "memory beyond all machines": (["--memory", "9" * 30 + "GiB"], ["more than a machine can address"]),
    "micro-batch 0": (["--micro-batch", "0"], ["--micro-batch '0'", "write --micro-batch 1 or more"]),
    "micro-batch -1": (["--micro-batch", "-1"], ["--micro-batch '-1'"]),
    "micro-batch NaN": (["--micro-batch", "NaN"], ["--micro-batch 'NaN'", "not a whole number"]),
    "micro-batch 1.5": (["--micro-batch", "1.5"], ["--micro-batch '1.5'"]),
    "micro-batch huge": (["--micro-batch", "9" * 30], ["more than 2147483647"]),
    "no accumulation at all": (["--accumulate", "0"], ["--accumulate '0'"]),
    "shape without length": (["--shape", "3x"], ["--shape 3x", "not items x length"]),
    "shape of three": (["--shape", "2x3x4"], ["--shape 2x3x4"]),
    "shape of nothing": (["--shape", "0"], ["--shape 0"]),
    "shape of a job without lengths": (["--shape", "3x4"], ["--shape 3x4", "write items alone, such as 8"]),
    "shape huge": (["--shape", "2147483648"], ["more than 2147483647 samples"]),
    "shape and micro-batch": (["--shape", "3", "--micro-batch", "3"], ["both say the same", "write one of them"]),
    "a setting without =": (["--set", "width"], ["--set width", "write --set name=value"]),
    "a setting without a name": (["--set", "=3"], ["--set =3"]),
    "an unknown setting": (["--set", "widht=3"], ["setting 'widht'", "write width="]),
    "a setting like no other": (["--set", "zzz=3"], ["setting 'zzz'", "its settings are", "width"]),
    "a word for a number": (["--set", "width=wide"], ["width=wide", "not a whole number"]),
    "a part for a whole": (["--set", "width=1.5"], ["width=1.5", "not a whole number"]),
    "a setting left empty": (["--set", "width="], ["width=", "not a whole number"]),
    "a rate in words": (["--set", "rate=fast"], ["rate=fast", "not a number"]),
    "perhaps": (["--set", "shuffle=maybe"], ["shuffle=maybe", "not true or false"]),
    "none of its words": (["--set", "kind=plane"], ["kind=plane", "write one of plain, wide"]),
    "precision twice": (
        ["--set", "precision=bf16", "--precision", "fp16"],
        ["--set precision=bf16 and --precision fp16: they contradict each other", "write one of them"],
    ),
    "checkpoint twice": (
        ["--set", "checkpoint=all", "--checkpoint", "none"],
        ["--set checkpoint=all and --checkpoint none: they contradict each other"],
    ),
    "set twice": (["--set", "width=3", "--set", "width=4"], ["width is set twice"]),
    "a length below zero": (["--set", "longest=-3"], ["longest=-3", "1 or more"]),
    "clipped to below zero": (["--set", "clip=-1"], ["clip=-1.0", "more than 0"]),
    "an average of more than all": (["--set", "ema=2"], ["ema=2.0", "less than 1"]),
    "an unknown precision": (["--precision", "fp8"], ["--precision", "write --precision fp32|bf16|fp16"]),
    "an unknown precision as a setting": (["--set", "precision=fp8"], ["precision=fp8", "fp32, bf16, fp16"]),
    "an unknown checkpoint": (["--checkpoint", "some"], ["--checkpoint some", "write none, all, or a file"]),
    "a snapshot that cannot be written": (
        ["--snapshot", "/proc/no/s.pickle"],
        ["--snapshot /proc/no/s.pickle", "cannot be written"],
    ),
}

WRONG_JOBS = {
    "NetOfAMissingModule": ["in nets()", "No module named 'not_there'", "install not_there, or take the import out"],
    "NetOnACard": ["in nets()", "leave .cuda() and device='cuda' out: memfit moves nets and batches to the device"],
    "NothingValid": ["turn 'loss'", "0 valid units in the made-up micro-batch", "write batch(self, shape)"],
    "DefaultOutsideItsValues": ["DefaultOutsideItsValues.kind = 'other'", "its annotation says one of plain, wide"],
    "DefaultOfAnotherType": ["DefaultOfAnotherType.width = 'eight'", "its annotation says a whole number"],
    "NoNets": ["NoNets: the job has no nets()"],
    "NoOptimizers": ["the job has no optimizers()"],
    "NoBatch": ["the job has no batch()"],
    "NoLoss": ["the job has no loss", "write loss(self, nets, batch) -> (sum, units)"],
    "NetsNotADict": ["NetsNotADict.nets()", "gave list, not a dict of modules"],
    "NetsEmpty": ["gave an empty dict"],
    "NetNoModule": ["net 'net'", "a str, not a torch.nn.Module"],
    "NetOfALambda": ["net 'net'", "a function, not a torch.nn.Module"],
    "NothingTrained": ["no parameter requires a gradient"],
    "NetsRaise": [f"{JOBS}:", "in nets()", "negative dimension -2"],
    "OptimizersNotADict": ["gave SGD, not a dict of optimizers"],
    "OptimizerOfAName": ["optimizer 'sgd'", "a str, not a torch.optim.Optimizer"],
    "OptimizerOverNothing": ["in optimizers()", "ValueError: optimizer got an empty parameter list"],
    "OptimizerOfAnother": ["they step no parameter of the nets"],
    "OptimizersShare": ["'one' and 'two'", "give each parameter to one optimizer"],
    "BatchRaises": [f"{JOBS}:", "in batch()", "KeyError: 'y'", "mend the job at that line"],
    "BatchOfAnotherWidth": [f"{JOBS}:", "in loss()", "RuntimeError"],
    "LossOfEach": ["a tensor of shape (4,), not a scalar"],
    "LossAlone": ["gave tensor, not (sum, units)"],
    "LossNone": ["gave NoneType, not (sum, units)"],
    "LossANumber": ["its sum is a float, not a tensor"],
    "BatchWithoutShape": ["BatchWithoutShape.batch(): too many positional arguments", "def batch(self, shape)"],
    "LossComplex": ["a complex number (torch.complex64), not a real one"],
    "LossDetached": ["does not depend on any trained parameter"],
    "LossInWholeNumbers": ["does not depend on any trained parameter"],
    "LossesNone": ["turn 'loss'", "gave no loss"],
    "LossRaises": ["in loss()", "ValueError: no such"],
    "LossCountsValues": ["bincount at", "wrong_jobs.py:", "depends on data"],
    "LossInPlace": ["turn 'loss'", "has no backward", "inplace operation"],
    "UnitsZero": ["loss 'loss'", "0 valid units", "1 or more"],
    "UnitsNegative": ["-3 valid units"],
    "UnitsNaN": ["nan valid units"],
    "UnitsAWord": ["'many' valid units"],
    "UnitsOfEach": ["a tensor of shape (4,), not one number"],
    "TurnOfNoOptimizer": ["turn 'only'", "no optimizer 'adam'", "write one of 'sgd'"],
    "TurnOfAnotherLoss": ["turn 'only': its loss: too many positional arguments", "takes (nets, batch, shared)"],
    "ScheduleThatEnds": ["schedule 'cycle': ValueError: Tried to step 2 times", "schedules(self, optimizers, windows)"],
    "UnitsHuge": ["loss 'loss': 1000000", "valid units; give the number of"],
    "Abstract": ["job Abstract: an abstract class: it lacks depth", "write def depth(self, ...)"],
    "MakesAnother": ["made a int of it"],
    "RangeOfNoSetting": ["RangeOfNoSetting.ranges['depth'] = (1, 2): no setting"],
    "RangeInWords": ["ranges['width'] = '4 to 16': not the least and the most"],
    "RangeReversed": ["the least is more than the most"],
    "TurnsNone": ["TurnsNone.turns()", "gave no turn"],
    "ValidateRaises": ["in validate()", "KeyError: 'other'"],
    "Rigth": [f"{JOBS} has no Rigth", f"write {JOBS}:Right"],
    "Zzzzzz": [f"{JOBS} has no Zzzzzz", "Right|"],
    "not_a_job": ["no class that derives from memfit.Job"],
    "": ["a file without the name of a job"],
}

FILES = {
    "a file that is not there": (None, "no such file"),
    "a syntax error": ("def f(:\n", "wrong.py:1: it does not import: SyntaxError"),
    "a module that is not installed": (
        "\nimport nothing_of_that_name\n",
        "wrong.py:2: it does not import: ModuleNotFoundError",
    ),
    "an exception": ("\n\n1 / 0\n", "wrong.py:3: it does not import: ZeroDivisionError: division by zero"),
    "a file that exits": ("import sys\nsys.exit(0)\n", "wrong.py:2: it does not import: SystemExit"),
    "no text": ("\0\1\2", "it does not import: SyntaxError"),
    "no job in it": ("Name = 3\n", "no class that derives from memfit.Job"),
}

SPECS = {
    "": "no built-in job of that name",
    "f5_tts/bas": "write f5_tts/base",
    RIGHT.partition(":")[0]: "a file without the name of a job",
    "no.such.package:Job": "ModuleNotFoundError: No module named 'no'",
    "json:loads": "no class that derives from memfit.Job",
    ":Right": "no built-in job of that name",
    "..jobs:Right": "it does not import",
    "memfit:Job": "no class that derives from memfit.Job",
}


@pytest.mark.parametrize(("arguments", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options(run: Run, arguments: list[str], words: list[str]) -> None:
    is_one_line(run(*arguments), *words)


@pytest.mark.parametrize(("arguments", "words"), VALUES.values(), ids=VALUES)
def test_values(run: Run, arguments: list[str], words: list[str]) -> None:
    is_one_line(run(*AT, *arguments, "--json"), *words)


@pytest.mark.parametrize(("name", "words"), WRONG_JOBS.items(), ids=WRONG_JOBS)
def test_jobs(run: Run, name: str, words: list[str]) -> None:
    is_one_line(run("predict", f"{JOBS}:{name}", "--device", "cpu", "--micro-batch", "4", "--json"), *words)


@pytest.mark.parametrize(("text", "words"), FILES.values(), ids=FILES)
def test_files(run: Run, tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "wrong.py").write_text(text)
    is_one_line(run("predict", f"{tmp_path}/wrong.py:Name", "--device", "cpu"), words)


@pytest.mark.parametrize(("spec", "words"), SPECS.items(), ids=SPECS)
def test_specs(run: Run, spec: str, words: str) -> None:
    is_one_line(run("predict", spec, "--device", "cpu"), words)


def test_a_module_that_cannot_be_recomputed(run: Run) -> None:
    answer = run("predict", f"{JOBS}:CheckpointsNothing", "--device", "cpu", "--checkpoint", "all")
    is_one_line(answer, "module 'net.blocks.0'", "no such module")


def test_two_losses_whose_units_are_known_too_late(run: Run) -> None:
    answer = run("predict", f"{JOBS}:TwoLosses", "--device", "cpu", "--accumulate", "2")
    is_one_line(answer, "losses one, two", "write units(self, batch)")


@pytest.mark.parametrize("units", [10**400, {"loss": 10**400}, {"loss": "many"}, {"loss": -1}])
def test_units_that_no_micro_batch_has_before_the_forward(units: int | dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"loss 'loss': units\(batch\) gave .* valid units; give a whole number"):
        known_units(WindowUnits(units=(units,), padded=4), ["loss"])


def test_an_optimizer_without_a_learning_rate_is_predicted_and_its_rate_is_not_multiplied(run: Run) -> None:
    code, out, _ = run("predict", f"{JOBS}:NoRate", "--device", "cpu", "--micro-batch", "4")
    assert code == 0
    assert out.startswith("Fits")
    with pytest.raises(InputError, match="optimizer 'relative': Relative has no learning rate"):
        build(NoRate(), "cpu", rate=2.0)


def test_a_job_that_closes_its_streams_gets_its_answer(run: Run) -> None:
    code, out, _ = run("predict", f"{JOBS}:ClosesItsStreams", "--device", "cpu", "--micro-batch", "4")
    assert code == 0
    assert out.startswith("Fits")


def test_a_shape_without_the_length_that_the_job_has(run: Run) -> None:
    answer = run("predict", f"{JOBS}:SampleTooLong", "--device", "cpu", "--shape", "3")
    is_one_line(answer, "--shape 3", "write items x length")


def test_a_job_that_prints_leaves_standard_output_to_the_json(run: Run) -> None:
    code, out, err = run("predict", f"{JOBS}:Speaks", "--device", "cpu", "--json")
    assert (code, json.loads(out)["fits"]) == (0, True)
    assert "building" in err


def test_the_job_without_a_mistake_has_none(run: Run) -> None:
    code, out, err = run(*AT, "--micro-batch", "4")
    assert (code, err) == (0, "")
    assert out.startswith("Fits")


def test_an_exception_of_memfits_own_is_a_fault_and_no_mistake() -> None:
    with pytest.raises(AttributeError) as caught:
        mistake_in_job("not an exception")  # type: ignore[arg-type]
    assert mistake_in_job(caught.value) is None


def test_an_extra_that_a_built_in_job_lacks_is_named_without_a_line_of_memfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "is_installed", lambda module: False)
    scope = {"__name__": "memfit.jobs.f5_tts"}
    exec(compile("def spectrum():\n    raise ModuleNotFoundError(name='soundfile')", f5_tts.__file__, "exec"), scope)
    with pytest.raises(ModuleNotFoundError) as caught:
        scope["spectrum"]()  # type: ignore[operator]
    mistake = mistake_in_job(caught.value)
    expected = "this command: it needs soundfile, which is not installed; run pip install 'memfit[jobs]'"
    assert str(mistake) == expected


def test_an_exception_in_a_built_in_job_comes_of_its_settings(run: Run) -> None:
    answer = run("predict", "f5_tts/tiny", "--device", "cpu", "--set", "dim=100")
    is_one_line(answer, "memfit/jobs/", "divisible by groups", "take back what --set changed")


def test_without_settings_it_is_a_fault_of_memfit(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.jobs.f5_tts import F5Tiny

    monkeypatch.setattr(F5Tiny, "dim", 100)
    with pytest.raises(ValueError, match="divisible by groups"):
        main(["predict", "f5_tts/tiny", "--device", "cpu"])


def test_a_mistake_for_real() -> None:
    is_one_line(really("predict", f"{JOBS}:LossOfShapesThatDoNotMatch", "--device", "t4"), "in loss()", "broadcast")
    answer = really("predict", f"{JOBS}:LossRaises", "--device", "rtx4090", "--json")
    is_one_line(answer, f"{JOBS}:", "ValueError: no such")
