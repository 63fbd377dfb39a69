"""Names of inductor, torch's compiler, of which memfit runs all but the generation of code; seconds to import."""

from __future__ import annotations

from memfit.torch_compat.versions import lacks

try:
    import torch._functorch.aot_autograd as aot_autograd
    import torch._inductor.scheduler as scheduling
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import virtualized
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table as decompositions
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

__all__ = [
    "CudaInterface",
    "DebugContext",
    "FakeTensorProp",
    "GraphLowering",
    "aot_autograd",
    "decompositions",
    "scheduling",
    "virtualized",
]
