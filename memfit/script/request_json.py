"""The request for the traced process as JSON, and back. Its imports start no thread."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from memfit.script.outcome import ScriptCommand, TraceRequest


def request_to_json(request: TraceRequest) -> str:
    """Returns a request, with its command, as one JSON object."""
    return json.dumps(asdict(request))


def request_from_json(text: str | bytes) -> TraceRequest:
    """Reads what ``request_to_json`` wrote."""
    values: dict[str, Any] = json.loads(text)
    command = ScriptCommand(**_tuples(ScriptCommand, values.pop("command")))
    return TraceRequest(command=command, **_tuples(TraceRequest, values))


def _tuples(kind: type[ScriptCommand] | type[TraceRequest], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a dataclass's fields; lists become tuples."""
    return {field.name: _tuple(values[field.name]) for field in fields(kind) if field.name in values}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value
