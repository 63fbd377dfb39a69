"""A simulation of torch's Schedule1F1B: when each stage computes, and what it waits for."""


def simulated_1f1b(stages, micro_batches, forward, backward, send):
    """Seconds until the last stage to end has ended, with the waits of torch's Schedule1F1B: a stage's sends and
    receives of one moment are one batch, which both sides must have come to, and which ends for all of it together.

    Args:
        forward, backward: seconds of each stage, or of all.
    """
    forward, backward = (
        list(each) if isinstance(each, list | tuple) else [each] * stages for each in (forward, backward)
    )
    steps = [_steps(stage, stages, micro_batches) for stage in range(stages)]
    clock, at, posted = [0.0] * stages, [0] * stages, {}
    while any(at[stage] < len(steps[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(steps[stage]):
                kind, what = steps[stage][at[stage]]
                if kind == "compute":
                    clock[stage] += forward[stage] if what == "F" else backward[stage]
                else:
                    for message in what:
                        posted.setdefault(message, {})[stage] = clock[stage]
                    if not all(len(posted[message]) == 2 for message in what):
                        break
                    ends = [max(posted[message].values()) + send for message in what]
                    clock[stage] = max([clock[stage], *ends])
                at[stage] += 1
                moved = True
        assert moved, "the stages wait for each other"
    return max(clock)


def _steps(stage, stages, count):
    """What a stage computes, and the messages (kind, micro-batch, from, to) that it waits for together."""

    def forward_message(number, source):
        return [("F", number, source, source + 1)] if 0 <= source < stages - 1 else []

    def backward_message(number, source):
        return [("B", number, source, source - 1)] if 0 < source < stages else []

    steps, warm, done = [], min(count, stages - stage), 0
    for number in range(warm):
        steps += [("wait", forward_message(number, stage - 1)), ("compute", "F")]
        if number < warm - 1:
            steps.append(("wait", forward_message(number, stage)))
    pending, number = forward_message(warm - 1, stage), warm
    while True:
        steps += [("wait", pending + backward_message(done, stage + 1)), ("compute", "B")]
        sent, done = backward_message(done, stage), done + 1
        if number == count:
            break
        steps += [("wait", sent + forward_message(number, stage - 1)), ("compute", "F")]
        pending, number = forward_message(number, stage), number + 1
    steps.append(("wait", sent))
    while done < count:
        steps += [
            ("wait", backward_message(done, stage + 1)),
            ("compute", "B"),
            ("wait", backward_message(done, stage)),
        ]
        done += 1
    return [(kind, what) for kind, what in steps if what]
