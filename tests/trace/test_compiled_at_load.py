"""What a job's file compiles when it is loaded: traced as what is compiled in the step, or as eager, which is said."""

import functools
import importlib
import json
import sys

import pytest
import torch

from memfit.cli import main
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Shape
from memfit.loading import load_job
from memfit.planner.predict import predict

ACT = """
import torch
from torch import nn

def act(x):
    return torch.sigmoid(nn.functional.gelu(nn.functional.silu(x) * 2))
"""
JOB = (
    "import functools\n"
    "import memfit\n"
    "from torch import compile as by_name\n"
    + ACT
    + """
loaded = torch.compile(act)
by_partial = functools.partial(torch.compile, fullgraph=True)

@torch.compile
def calls_another(x):
    return loaded(x)

@torch.compiler.disable
def disabled(x):
    return act(x)

class Act(nn.Module):
    def forward(self, x):
        return act(x)

class Decorated(nn.Module):
    @torch.compile(fullgraph=True)
    def forward(self, x):
        return act(x)

@torch.compile
class DecoratedClass(Act):
    pass

in_place = Act()
in_place.compile()
kept = []

def compiled_once(x):
    if not kept:
        kept.append(torch.compile(act))
    return kept[0](x)

def breaks(x):
    torch._dynamo.graph_break()
    return act(x)

HOW = {
    "written": act,
    "in the step": lambda x: torch.compile(act)(x),
    "loaded": loaded,
    "decorated": torch.compile(dynamic=True, fullgraph=True)(act),
    "default mode": torch.compile(act, mode="default", options=None),
    "by partial": by_partial(act),
    "by partial in the step": lambda x: by_partial(act)(x),
    "by name": by_name(act),
    "by name in the step": lambda x: by_name(act)(x),
    "compiled twice": torch.compile(loaded),
    "calls another": calls_another,
    "method": Decorated(),
    "net": torch.compile(Act()),
    "net in place": in_place,
    "once for all traces": compiled_once,
    "mode": torch.compile(mode="reduce-overhead")(act),
    "mode in the step": lambda x: torch.compile(act, mode="reduce-overhead")(x),
    "options": torch.compile(act, options={"max_autotune": True}),
    "eager": torch.compile(act, backend="eager"),
    "eager in the step": lambda x: torch.compile(act, backend="eager")(x),
    "aot_eager": torch.compile(act, backend="aot_eager"),
    "net of a mode": torch.compile(Act(), mode="max-autotune"),
    "class": DecoratedClass(),
    "dynamo": torch._dynamo.optimize("inductor")(act),
    "two graphs": torch.compile(breaks),
    "disabled": disabled,
    "compile disabled": torch.compile(act, disable=True),
}

class Acts(memfit.Job):
    how: str = "written"

    def __init__(self, **settings):
        super().__init__(**settings)
        self.made = torch.compile(act)

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 64)

    def loss(self, nets, x):
        first, second = nets["net"]
        called = HOW.get(self.how, self.made)
        return second(called(first(x))).square().sum(), len(x)
"""
)
PLANNED = [
    "loaded", "decorated", "default mode", "by partial", "by partial in the step", "by name", "by name in the step",
    "compiled twice", "calls another", "method", "net", "net in place", "once for all traces", "constructor",
]  # fmt: skip
EAGER = [
    "mode", "mode in the step", "options", "eager", "eager in the step", "aot_eager", "net of a mode", "class",
    "dynamo", "two graphs",
]  # fmt: skip
GPU, CPU = find_device("rtx4090"), with_memory(find_device("cpu"), 1 << 34)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("job") / "acts.py"
    file.write_text(JOB)
    return file


def predicted(job, device=GPU):
    """(bytes of the training's peak, what is said of compiled code)."""
    prediction = predict(job, "acts", Shape(items=1024), device)
    said = [line for line in prediction.trace.assumed if "compiled code" in line]
    return prediction.footprint.phases["train"].allocated_bytes, said


@functools.cache
def of(file, how, device=GPU):
    return predicted(load_job(f"{file}:Acts", {"how": how}), device)


@pytest.mark.parametrize("how", PLANNED)
def test_what_is_compiled_at_load_takes_what_is_compiled_in_the_step(file, how):
    nbytes, said = of(file, "in the step")
    assert nbytes < of(file, "written")[0]
    assert "not validated on a card" in said[0]
    assert of(file, how) == (nbytes, said)


@pytest.mark.parametrize("how", EAGER)
def test_what_inductor_s_plan_is_not_known_for_is_eager_code_and_says_so(file, how):
    nbytes, said = of(file, how)
    assert nbytes == of(file, "written")[0]
    assert len(said) == 1
    assert "as eager code" in said[0]


@pytest.mark.parametrize("how", ["disabled", "compile disabled"])
def test_what_is_not_compiled_says_nothing(file, how):
    assert of(file, how) == of(file, "written")
    assert not of(file, how)[1]


def test_a_trace_for_the_cpu_takes_the_same_as_compiled_in_the_step(file):
    nbytes, said = of(file, "in the step", CPU)
    assert nbytes < of(file, "written", CPU)[0]
    assert of(file, "loaded", CPU) == of(file, "net", CPU) == (nbytes, said)
    assert "as eager code" in of(file, "mode", CPU)[1][0]


@pytest.mark.parametrize("how", ["loaded", "net", "once for all traces"])
def test_a_second_trace_of_a_job_says_the_same_for_another_device_too(file, how):
    job = load_job(f"{file}:Acts", {"how": how})
    answers = [predicted(job, device) for device in (GPU, CPU, GPU)]
    assert answers[0] == answers[2] == of(file, "in the step")
    assert answers[1] == of(file, "in the step", CPU)


def test_what_a_trace_compiled_computes_outside_of_it(file):
    """Code keeps what it compiled in the first step: in a real run after a trace it is what torch made."""
    job = load_job(f"{file}:Acts", {"how": "once for all traces"})
    predicted(job)
    module = sys.modules[type(job).__module__]
    with torch.compiler.set_stance("force_eager"):  # inductor needs a compiler for the CPU
        x = torch.randn(4, 4)
        assert torch.equal(module.kept[0](x), module.act(x))
        assert torch.equal(module.loaded(x), module.act(x))


def test_a_job_named_as_a_module_and_what_it_imports_are_noted_too(file, tmp_path, monkeypatch):
    (tmp_path / "acts_package").mkdir()
    (tmp_path / "acts_package" / "__init__.py").write_text("")
    (tmp_path / "acts_package" / "kernels.py").write_text(ACT + "loaded = torch.compile(act)\n")
    text = JOB.replace("loaded = torch.compile(act)\n", "from acts_package.kernels import loaded\n", 1)
    (tmp_path / "acts_package" / "job.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # the second time it is imported already
        assert predicted(load_job("acts_package.job:Acts", {"how": "loaded"})) == of(file, "in the step")


def test_what_a_library_compiled_before_is_eager_code_and_says_so(file, tmp_path, monkeypatch):
    (tmp_path / "acts_library.py").write_text(ACT + "loaded = torch.compile(act)\n")
    text = JOB.replace("loaded = torch.compile(act)\n", "from acts_library import loaded\n", 1)
    (tmp_path / "after_acts.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("acts_library")
    nbytes, said = predicted(load_job(f"{tmp_path / 'after_acts.py'}:Acts", {"how": "loaded"}))
    assert nbytes == of(file, "written")[0]
    assert "as eager code" in said[0]


def test_a_load_leaves_torch_compile_as_it_was(file):
    before = torch.compile
    load_job(f"{file}:Acts", {"how": "loaded"})
    assert torch.compile is before


@pytest.mark.parametrize("as_json", [False, True])
def test_a_comparison_says_how_each_variant_was_traced(file, as_json, capsys, monkeypatch):
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "0")
    monkeypatch.setenv("COLUMNS", "400")
    name = f"{file}:Acts"
    variants = ["--set", "how=loaded", "--set", "how=mode", "--device", "rtx4090", *(["--json"] if as_json else [])]
    with pytest.raises(SystemExit) as ended:
        main(["compare", name, *variants])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    if as_json:
        subjects = json.loads(out)["subjects"]
        said = [[line.split("takes ")[1][:11] for line in subject["assumed"]] for subject in subjects]
        assert said == [[], ["the buffers"], ["what it doe"]]
    else:
        assert f"Assumed for {name} how=loaded: compiled code takes the buffers" in out
        assert f"Assumed for {name} how=mode: compiled code takes what it does as eager code" in out
