"""Questions to a job that were traced in this process: another card with the same facts is answered without a trace."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.device.hardware.catalogue import Device
from memfit.job import Job, Shape
from memfit.planner.prediction import Prediction, TracedQuestion, answer, holds_for


class TracedQuestions:
    """The traces of one process by job, settings, shape and choices."""

    def __init__(self) -> None:
        self._known: dict[str, list[TracedQuestion]] = {}
        self.traced = 0
        """Questions that needed a trace."""

    def predict(self, job: Job, name: str, shape: Shape, device: Device, **choices: Any) -> Prediction:
        """Predicts as ``memfit.planner.predict.predict`` does, to the byte."""
        begin = time.perf_counter()
        known = self._known.setdefault(_key(job, shape, choices), [])
        question = next((question for question in known if holds_for(question, device)), None)
        if question is None:
            from memfit.planner.predict import trace_question

            question = trace_question(job, shape, device, **choices)
            known.append(question)
            self.traced += 1
        prediction = answer(question, name, device)
        return replace(prediction, seconds=time.perf_counter() - begin)

    def all(self) -> list[TracedQuestion]:
        """Every question that was traced."""
        return [question for known in self._known.values() for question in known]


def _key(job: Job, shape: Shape, choices: Mapping[str, Any]) -> str:
    kind = type(job)
    return json.dumps(
        [kind.__module__, kind.__qualname__, id(kind), job.settings(), str(shape), dict(choices)],
        default=str, sort_keys=True,
    )  # fmt: skip
