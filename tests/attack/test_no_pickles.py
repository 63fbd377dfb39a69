"""memfit's own code opens no pickle that could run something, and writes no file that can be seen half-written.

python -m pytest tests/attack/test_no_pickles.py
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "memfit"
RESTRICTED = {
    "forked_process.py": "reads what this process's own copy wrote, by a pipe and a file that has no name",
    "train/checkpoint/legacy_parts.py": "an unpickler whose every class is a stand-in",
    "train/data/transport.py": "reads what this process's own workers wrote, by a pipe and memory that no file has",
    "show/snapshot.py": "writes for pytorch.org/memory_viz, which reads nothing else",
}
WRITES_IN_PLACE = {
    "atomic_file.py": "writes the temporary file",
    "audit/rank_entry.py": "a private temporary folder, read after the process has ended",
    "cli/background_traces.py": "the kernel's own files, and a lock without content",
    "forked_process.py": "output that goes nowhere",
    "monitoring/step_outputs.py": "appends lines",
    "script/files.py": "patches what a script calls, in its sandbox",
    "script/namespaces.py": "the kernel's own files",
    "script/titan/describe.py": "answers on standard output",
    "script/titan/images.py": "runs in the sandbox of a traced script, which keeps it off the disk",
    "script/worker.py": "answers through an open file",
    "show/scalars.py": "appends records",
    "standard_streams.py": "output that goes nowhere",
    "train/checkpoint/checkpoints.py": "a folder that is renamed when it is whole",
    "train/checkpoint/tensor_file.py": "a folder that is renamed when it is whole",
    "train/launch/crash_stacks.py": "written by a process that crashes, which runs no more Python",
    "train/launch/memory_limit.py": "the kernel's own files",
    "train/launch/node_folders.py": "a checkpoint's copy, whose manifest comes last",
    "train/launch/outcome.py": "the first of several ranks creates it; one that is cut is passed over",
    "train/launch/watchdog.py": "written while the process is being ended",
    "train/line_parts.py": "compresses into a file that is renamed when it is whole",
    "verify/world_worker.py": "a private temporary folder, read after all ranks have met",
}


PICKLES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")


def keyword(call, name):
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), None)


def opens_a_pickle(node):
    if isinstance(node, ast.Import):
        return any(alias.name in PICKLES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in PICKLES
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if name == "torch.load":
        return keyword(node, "weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return keyword(node, "allow_pickle") != "False"
    return name.endswith(("PackageImporter", "FileSystemReader"))


def writes_in_place(node):
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    last = name.rpartition(".")[2]
    if last in ("write_text", "write_bytes") or name in ("torch.save", "json.dump"):
        return True
    if last not in ("open", "fdopen") or name == "os.open":
        return False
    at = 1 if name in ("open", "os.fdopen") else 0
    mode = keyword(node, "mode") or (ast.unparse(node.args[at]) if len(node.args) > at else "")
    return bool(set(mode) & set("wax"))


@pytest.mark.parametrize(
    ("is_one", "allowed"), [(opens_a_pickle, RESTRICTED), (writes_in_place, WRITES_IN_PLACE)], ids=["pickles", "writes"]
)
def test_only_the_files_that_are_named_here_do_so(is_one, allowed):
    files = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(map(is_one, ast.walk(ast.parse(path.read_text()))))
    }
    assert files == set(allowed)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("import pickle", opens_a_pickle),
        ("from dill import loads", opens_a_pickle),
        ("torch.load(path)", opens_a_pickle),
        ("torch.load(path, weights_only=False)", opens_a_pickle),
        ("np.load(path)", opens_a_pickle),
        ("path.write_text('')", writes_in_place),
        ("open(path, 'w')", writes_in_place),
        ("path.open('wb')", writes_in_place),
        ("os.fdopen(handle, 'ab')", writes_in_place),
    ],
)
def test_what_is_looked_for_is_seen(text, is_one):
    assert any(map(is_one, ast.walk(ast.parse(text))))
