"""Spoiled inputs of every kind, and whether memfit answers each in one line: no traceback, no hang.

python -m bench.fuzz --cases 5000 [--seed 0] [--kinds plan,trace] [--out bench/results/fuzz.json]

A case is one file, setting or job, spoiled by chance, given to the command that reads it, in this process. It passes
where the exit code is one of the contract's other than 1, and a user's mistake is one line. A case that fails is
printed with its number; ``--case KIND:NUMBER`` with the same seed runs it alone and shows its traceback.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.fuzz_parts.inputs import Inputs
from bench.result_file import write_result

CODES = (0, 2, 3, 4, 5)
SECONDS, WALL_SECONDS = 60, 600
"""A case that takes more of the processor, or of the clock on a machine with other work, hangs."""
MEMORY = 4 << 30


def main() -> int:
    """Runs the cases; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--case", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_CONFIG_HOME": f"{folder}/config"}
        inputs = Inputs(Path(folder))
        if asked.case:
            kind, _, number = asked.case.partition(":")
            answer = run_case(inputs, kind, seed, int(number))
            print(json.dumps(answer, indent=1) if answer else "passed")
            return int(answer is not None)
        return run(inputs, asked, seed)


def run(inputs: Inputs, asked: argparse.Namespace, seed: int) -> int:
    """Cases of all kinds in turn."""
    kinds = asked.kinds.split(",") if asked.kinds else inputs.kinds()
    counts: collections.Counter[str] = collections.Counter()
    codes: collections.Counter[str] = collections.Counter()
    failed, begin = [], time.monotonic()
    for number in range(asked.cases):
        kind = kinds[number % len(kinds)]
        answer = run_case(inputs, kind, seed, number, codes)
        counts[kind] += 1
        if answer is not None:
            failed.append(answer)
            print(f"{kind}:{number} {answer['what']}", flush=True)
    result = {
        "cases": asked.cases,
        "seed": seed,
        "failed": len(failed),
        "by_kind": dict(counts),
        "exit_codes": dict(sorted(codes.items())),
        "seconds": round(time.monotonic() - begin, 1),
        "failures": [{**answer, "traceback": answer["traceback"][-1:]} for answer in failed],
    }
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}))
    if asked.out:
        write_result(asked.out, result)
    return int(bool(failed))


def run_case(
    inputs: Inputs, kind: str, seed: int, number: int, codes: collections.Counter[str] | None = None
) -> dict[str, Any] | None:
    """What is wrong with the answer to one case; None where nothing is."""
    chance = random.Random(f"{seed} {kind} {number}")
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    place = {"kind": kind, "number": number}
    try:
        with (
            _in_time(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            warnings.simplefilter("ignore")
            code = inputs.case(kind, chance)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = traceback.format_exception(error)
        return {**place, "what": f"{type(error).__name__}: {str(error)[:200]}", "traceback": lines[-12:]}
    finally:
        inputs.clean()
    if codes is not None:
        codes[str(code)] += 1
    said = err.getvalue()
    if code not in CODES:
        return {**place, "what": f"exit code {code}", "traceback": said.splitlines()[-12:]}
    if "Traceback" in said:
        return {**place, "what": "a traceback on standard error", "traceback": said.splitlines()[-12:]}
    lines = [line for line in said.splitlines() if line.startswith("memfit: ")]
    if code == 2 and len(lines) != 1:
        return {**place, "what": f"{len(lines)} lines for one mistake", "traceback": said.splitlines()[-12:]}
    if "\x1b" in said or "\x1b" in out.getvalue():
        return {**place, "what": "a control sequence in the output", "traceback": said.splitlines()[-12:]}
    return None


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not done in {SECONDS} s of the processor, or {WALL_SECONDS} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
