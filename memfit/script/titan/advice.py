"""What a person does about an error of torchtitan's."""

from __future__ import annotations

from memfit.errors import is_installed
from memfit.script.outcome import NOT_FOLLOWED

_STUB = ", or write --stub"
"""Of a hint about a missing package, which ``memfit trace`` alone can leave out."""
_SELECTIVE = "region computed under selective activation checkpoint"
"""Of torch's error where a zero-bubble schedule meets selective checkpointing."""


def advice(summary: str, hint: str = "") -> str:
    """What a person does about an error of torchtitan: kernels of MXFP8 and NVFP4 are Triton's, or other packages'.

    Args:
        summary: the error, in one line.
        hint: what a trace of any script says of the error; it counts where nothing is known of torchtitan's.
    """
    hint = "" if hint == NOT_FOLLOWED else hint.partition(_STUB)[0]
    if "triton" in summary.lower() and not is_installed("triton"):
        return "install triton, whose kernels these layers start"
    if _SELECTIVE in summary:
        return "write --set activation_checkpoint=full or none, since this schedule goes backward through a layer twice"
    is_missing = "install" in summary.lower() or summary.startswith(("ImportError", "ModuleNotFoundError"))
    return hint or ("install what it names" if is_missing else "change the settings that it names")
