"""Wrong uses of the command line, made systematically: values of options, and what a job's attributes and methods are.

Every use is (name, arguments); what needs a file is written into the folder that is given.
"""

from collections.abc import Iterator
from pathlib import Path

import click

from memfit.cli import VERBS, root
from tests.cli.asking import JOBS as JOBS_AT_ROOT
from tests.cli.asking import ROOT

JOBS = str(ROOT / JOBS_AT_ROOT)
RIGHT = f"{JOBS}:Right"
Use = tuple[str, list[str]]

TEXTS = ("", "0", "-1", "nan", "1.5", "9" * 30, "no/such/file", "ü€", "a=b=c", "none", "--", "1x1x1", "{}", "\t", "*")
BASES = {
    "devices": [], "jobs": [RIGHT], "predict": [RIGHT, "--device", "cpu"],
    "plan": [RIGHT, "--memory", "256MiB", "--global-batch", "4"], "report": ["no/run"], "audit": ["no.py:loader"],
    "export": ["no/plan.toml", "--to", "torchrun"], "verify": ["no/plan.toml"], "validate": ["no/run"],
    "run": ["no/plan.toml", "--out", "no/run"], "probe": ["no/plan.toml"],
    "explain": ["no/log"], "lint": ["no/train.py"], "max": ["no/job.py:Job", "--device", "rtx4090"],
    "cards": ["no/job.py:Job"], "ui": ["no/job.py:Job"], "compare": ["no/a.toml", "no/b.toml"],
    "trace": ["--", "python", "no/train.py"],
}  # fmt: skip
"""A command line of each verb to which a wrong option is added. Those of files that are not there never begin."""

ATTRIBUTES = (
    "unit", "longest", "precision", "autocasts_itself", "checkpoint", "clip", "zero_grad", "ema", "wrapper", "windows",
    "unsynchronised", "validate_every", "ranges", "upstream", "validation_levers", "smaller_settings", "net_phases",
    "validation_smaller", "validates",
)  # fmt: skip
VALUES = ("'1'", "-1", "1.5", "[1]", "{'a': 1}", "object()", "None")

METHODS = {
    "nets": "self", "optimizers": "self, nets", "schedules": "self, optimizers, windows", "batch": "self, shape",
    "loss": "self, nets, batch", "turns": "self, optimizers", "units": "self, batch", "dataset": "self",
    "collate": "self, samples", "lengths": "self", "validation_batch": "self, shape", "validate": "self, nets, batch",
    "saved": "self, nets, optimizers", "checkpointable": "self, nets", "also_checkpointable": "self, nets",
    "validation_dataset": "self", "validation_collate": "self, samples", "repeats": "self, count",
}  # fmt: skip
MORE = {
    "dataset": ["--epoch", "2"], "lengths": ["--epoch", "2"], "checkpointable": ["--checkpoint", "all"],
    "units": ["--accumulate", "2", "--epoch", "2"],
}  # fmt: skip
"""Options with which ``predict`` asks a method that it does not ask otherwise."""
RESULTS = (
    "return None", "return 3", "return 'text'", "return [1, 'two']", "return {'a': 'b'}", "return (1, 2)",
    "return -1.5", "return object()", "return torch.ones(2)", "return {}", "return []", "yield 1",
    "raise KeyError('gone')", "raise NotImplementedError", "import no_such_module",
)  # fmt: skip
CONSTRUCTORS = (
    "def __init__(self): self.width = 8",
    "def __init__(self, depth): super().__init__()",
    "def __init__(self, *, width=8): self.width = width",
    "def __init__(self, **settings): raise ValueError('no')",
    "needed: int",
    "needed: list[int]",
    "other: 'NoSuchName' = 3",
    "width: int = 'eight'",
    "width = None",
    "nets = 3",
    "loss = None",
    "batch = torch.ones(3)",
    "units = property(lambda self: 3)",
    "longest = property(lambda self: 'far')",
)  # fmt: skip


def wrong_options() -> Iterator[Use]:
    """Each option of each verb with each text."""
    context = click.Context(root)
    for verb in VERBS:
        command = root.get_command(context, verb)
        if command is None or verb not in BASES:
            continue
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag and option.name != "help":
                name = max(option.opts, key=len)
                for text in TEXTS:
                    base = BASES[verb]
                    if name in base:
                        at = base.index(name)
                        base = base[:at] + base[at + 2 :]
                    asked = [name, text]
                    complete = [*asked, *base] if base[:1] == ["--"] else [*base, *asked]
                    yield f"{verb} {name} {text!r}", [verb, *complete]


def wrong_jobs(folder: Path) -> Iterator[Use]:
    """Jobs of which one attribute, method or constructor is wrong: predicted and planned."""
    lines = ["import torch", "import memfit", "from tests.cli.wrong_jobs import Right", ""]
    names: dict[str, str] = {}

    def add(what: str, body: str) -> None:
        name = f"Wrong{len(names)}"
        names[name] = what
        lines.extend([f"class {name}(Right):", f"    {body}", ""])

    for attribute in ATTRIBUTES:
        for value in VALUES:
            add(f"{attribute} = {value}", f"{attribute} = {value}")
    for method, parameters in METHODS.items():
        for result in RESULTS:
            add(f"{method}: {result}", f"def {method}({parameters}): {result}")
    for line in CONSTRUCTORS:
        add(line, line)
    path = folder / "wrong.py"
    path.write_text("\n".join(lines))
    for name, what in names.items():
        method = what.partition(":")[0]
        arguments = ["predict", f"{path}:{name}", "--device", "cpu", "--micro-batch", "4", *MORE.get(method, [])]
        if method == "also_checkpointable":
            arguments = ["plan", f"{path}:{name}", "--memory", "256MiB", "--global-batch", "4", "--micro-batch", "4"]
        yield f"predict {what}", arguments


def wrong_plans(folder: Path, plan: str) -> Iterator[Use]:
    """Plans of which one line has another value."""
    values = ("-1", "'text'", "[]", "{}", "1.5", "true", "nan", "9223372036854775807", "[[4], [4]]", "1979-05-27")
    lines = plan.splitlines()
    top = next((i for i, line in enumerate(lines) if line.startswith("[")), len(lines))
    for i, line in enumerate(lines[:top]):
        key, equals, _ = line.partition(" = ")
        if not equals or line.startswith((" ", "]")):
            continue
        end = i + 1
        if line.rstrip().endswith("["):
            end = next(j for j in range(i, top) if lines[j].startswith("]")) + 1
        for value in values:
            path = folder / f"plan-{i}-{values.index(value)}.toml"
            path.write_text("\n".join([*lines[:i], f"{key} = {value}", *lines[end:]]) + "\n")
            yield f"export {key} = {value}", ["export", str(path), "--to", "torchrun"]


BODIES = (
    "def loss(self, nets, batch): return nets['net'](batch.cuda(7)).sum(), len(batch)",
    "def loss(self, nets, batch): return nets['other'](batch).sum(), len(batch)",
    "def loss(self, nets, batch): return nets['net'](batch).sum(), 0",
    "def loss(self, nets, batch): return nets['net'](batch).sum(), float('nan')",
    "def loss(self, nets, batch): return {'a': nets['net'](batch).sum()}, len(batch)",
    "def loss(self, nets, batch): exit(3)",
    "def loss(self, nets, batch): raise SystemExit('done')",
    "def loss(self, nets, batch): assert False, 'a\\nb'",
    "def loss(self, nets, batch): return self.loss(nets, batch)",
    "def loss(self): return None",
    "def batch(self, shape): return {1: torch.ones(shape.items, 8), None: [object()]}",
    "def batch(self, shape): return torch.ones(10**15)",
    "def batch(self, shape): return torch.ones(shape.items, 8).to('mps')",
    "def batch(self, shape): return open('no/such/file')",
    "def nets(self): return {'net': torch.nn.Linear(8, 2).to('no such device')}",
    "def nets(self): return {'net': torch.nn.Linear(10**9, 10**9)}",
    "def nets(self): return {'': torch.nn.Linear(8, 2)}",
    "def nets(self): return {'a.b': torch.nn.Linear(8, 2)}",
    "def nets(self): return {1: torch.nn.Linear(8, 2)}",
    "def nets(self): return {'net': torch.nn.Linear}",
    "def optimizers(self, nets): return {'a': torch.optim.SGD(nets['net'].parameters(), lr=-1)}",
    "def optimizers(self, nets): return {'a': torch.optim.LBFGS(nets['net'].parameters())}",
    "def optimizers(self, nets): return {'a': torch.optim.SGD}",
    "def optimizers(self, nets): return {'a': torch.optim.SGD(nets['no'].parameters())}",
    "def schedules(self, optimizers, windows): return {'a': torch.optim.lr_scheduler.StepLR(optimizers['no'], 1)}",
    "def turns(self, optimizers): return [memfit.Turn(name='a', loss=self.loss, optimizers=('no',))]",
    "def turns(self, optimizers): return [memfit.Turn(name='a', loss=3, optimizers=('sgd',))]",
    "def turns(self, optimizers): return [memfit.Turn()]",
    "settings = 3",
    "setting_types = None",
    "__init__ = None",
    "__getattribute__ = lambda self, name: 1 / 0",
    "__hash__ = None",
    "width: int = torch.ones(3)",
    "width: 'list[int' = [1]",
)
"""Methods that are wrong as a person's are: another device, a name that is not there, an exit, sizes of no machine."""


def wrong_bodies(folder: Path) -> Iterator[Use]:
    """Jobs with one of these in its class."""
    lines = ["import torch", "import memfit", "from tests.cli.wrong_jobs import Right", ""]
    for index, body in enumerate(BODIES):
        lines += [f"class Body{index}(Right):", f"    {body}", ""]
    path = folder / "bodies.py"
    path.write_text("\n".join(lines))
    for index, body in enumerate(BODIES):
        for device in ("cpu", "rtx4090"):
            arguments = ["predict", f"{path}:Body{index}", "--device", device, "--micro-batch", "4"]
            yield f"predict --device {device} {body}", arguments


def wrong_files(folder: Path) -> Iterator[Use]:
    """Files of another kind, empty, cut off, a folder, or none, where a plan, a run, a log or a trace is asked for."""
    contents = {
        "empty": b"", "zeros": bytes(64), "text": b"hello", "json": b"{}", "list": b"[1, 2]", "toml": b"a = 1\n",
        "cut": b'{"a": [1, 2', "latin": "name = 'h\u00e9'".encode("latin-1"), "deep": b"[" * 5000,
        "pickle": b"\x80\x04N.", "python": b"def f(:\n",
    }  # fmt: skip
    paths = {name: folder / f"{name}.file" for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    (folder / "some folder").mkdir()
    places = [*paths.values(), folder / "some folder", Path("/dev/null"), folder / ("n" * 300), folder / "a\nb"]
    for place in map(str, places):
        for verb, *more in (
            ("run", "--out", str(folder / "out")), ("export", "--to", "torchrun"), ("audit", "--world-sizes", "1"),
            ("report",), ("verify",), ("explain",), ("lint",), ("compare",), ("probe",),
        ):  # fmt: skip
            yield f"{verb} {place}", [verb, place, *more]
        yield f"plan --from-trace {place}", ["plan", "--from-trace", place, "--device", "rtx4090"]
        yield f"predict {place}:Job", ["predict", f"{place}:Job", "--device", "cpu"]
        yield f"devices --add {place}", ["devices", "--add", place]
        yield f"cards --prices {place}", ["cards", RIGHT, "--prices", place]


def wrong_specs() -> Iterator[Use]:
    """What stands where a job is named."""
    for spec in (
        *TEXTS,
        f"{JOBS}:",
        f"{JOBS}:Right:Right",
        "tests.cli:Right",
        "os:path",
        "memfit.job:Job",
        "./:X",
        ".",
    ):
        for verb in ("predict", "plan", "jobs"):
            more = ["--global-batch", "4"] if verb == "plan" else []
            yield f"{verb} {spec!r}", [verb, spec, *more]
