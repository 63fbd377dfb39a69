"""The built-in jobs: a name and settings go in, a ``Job`` that stands for a project's training step comes out.

Nothing is imported until a job is asked for.
"""

BUILTIN: dict[str, str] = {
    "e2_tts/base": "memfit.jobs.f5_tts:E2Base",
    "e2_tts/small": "memfit.jobs.f5_tts:E2Small",
    "f5_tts/base": "memfit.jobs.f5_tts:F5Base",
    "f5_tts/small": "memfit.jobs.f5_tts:F5Small",
    "f5_tts/tiny": "memfit.jobs.f5_tts:F5Tiny",
    "gpt_sovits/s1": "memfit.jobs.gpt_sovits_s1:S1",
    "gpt_sovits/s2": "memfit.jobs.gpt_sovits_s2:S2",
    "gpt_sovits/s2_v3": "memfit.jobs.gpt_sovits_s2_v3:S2V3",
    "gpt_sovits/tiny": "memfit.jobs.gpt_sovits_s2:GptSovitsTiny",
    "latentsync/stage1": "memfit.jobs.latentsync:LatentSyncStage1",
    "latentsync/stage1_512": "memfit.jobs.latentsync:LatentSyncStage1At512",
    "latentsync/stage2": "memfit.jobs.latentsync:LatentSyncStage2",
    "latentsync/stage2_512": "memfit.jobs.latentsync:LatentSyncStage2At512",
    "latentsync/stage2_efficient": "memfit.jobs.latentsync:LatentSyncStage2Efficient",
    "latentsync/tiny": "memfit.jobs.latentsync_tiny:LatentSyncTiny",
    "musetalk/stage1": "memfit.jobs.musetalk:MuseTalkStage1",
    "musetalk/stage2": "memfit.jobs.musetalk:MuseTalkStage2",
    "musetalk/tiny": "memfit.jobs.musetalk:MuseTalkTiny",
}
"""Name -> ``module:Class``."""
