"""A process that plans as ``memfit plan`` does, and says what a second core traced for it.

python -m tests.planner.second_core_plan CORES ARGUMENTS OF MEMFIT PLAN
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

from memfit import forked_process
from memfit.cli import main
from memfit.forked_process import ForkedProcess, NoResultError
from memfit.planner.search import second_core
from memfit.planner.search.second_core import CopiedFullStep, CopiedJob, SecondCore
from memfit.trace.session import Session


def same(mine, other):
    """Whether two traces are equal, array by array."""
    return all(
        getattr(mine.trace, name).tobytes() == value.tobytes() if hasattr(value, "tobytes") else
        getattr(mine.trace, name) == value
        for name, value in vars(other.trace).items()
    )  # fmt: skip


def plan(cores, arguments):
    """(exit code, the plan's JSON, counts of what was begun, taken and equal to a trace of one's own)."""
    counts = {"forked": 0, "begun": 0, "taken": 0, "equal": 0, "full steps": 0}
    begin, trace, full_step = SecondCore.begin_trace, SecondCore.trace, SecondCore.full_step
    fork = ForkedProcess.__init__

    def count_forks(self, target):
        counts["forked"] += isinstance(target, CopiedJob | CopiedFullStep)
        fork(self, target)

    def count_begun(self, key):
        counts["begun"] += 1
        begin(self, key)

    def count_taken(self, key, session: Session):
        micro_trace = trace(self, key, session)
        if micro_trace is not None:
            counts["taken"] += 1
            shape, modes, accumulated, precision = key
            mine = session.micro_batch(shape, dict(modes), accumulated=accumulated, precision=precision)
            counts["equal"] += same(mine, micro_trace)
        return micro_trace

    def count_full_steps(self, best):
        result = full_step(self, best)
        counts["full steps"] += result is not None
        return result

    ForkedProcess.__init__ = count_forks
    SecondCore.begin_trace, SecondCore.trace, SecondCore.full_step = count_begun, count_taken, count_full_steps
    forked_process.available_cores = second_core.available_cores = lambda: cores
    output, code = StringIO(), 0
    with redirect_stdout(output):
        try:
            main(["plan", *arguments, "--json"])
        except SystemExit as ended:
            code = ended.code
        except NoResultError:
            code = -1
    text = output.getvalue()
    answer = json.loads(text) if text else None
    if answer:
        answer.pop("seconds")
    return code, answer, counts


if __name__ == "__main__":
    print(json.dumps(plan(int(sys.argv[1]), sys.argv[2:])))
