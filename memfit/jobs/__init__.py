"""The built-in jobs, by name. Nothing is imported until a job is asked for."""

BUILTIN: dict[str, str] = {
    "e2_tts/base": "memfit.jobs.f5_tts:E2Base",
    "e2_tts/small": "memfit.jobs.f5_tts:E2Small",
    "f5_tts/base": "memfit.jobs.f5_tts:F5Base",
    "f5_tts/small": "memfit.jobs.f5_tts:F5Small",
    "f5_tts/tiny": "memfit.jobs.f5_tts:F5Tiny",
}
"""Name -> ``module:Class``."""
