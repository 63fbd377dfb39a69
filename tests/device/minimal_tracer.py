"""A tracer just large enough to test the virtual devices: storages' bytes as they come and go."""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from memfit.device.virtual.data_dependent import NOT_HANDLED

_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}


class MinimalTracer(TorchDispatchMode):
    def __init__(self, virtual):
        super().__init__()
        self.virtual = virtual
        self.ops, self.events, self.sizes = [], [], weakref.WeakKeyDictionary()
        self.live = self.peak = 0
        self.muted = False

    def __enter__(self):
        self.virtual.on_resize.append(self.resized)
        return super().__enter__()

    def __exit__(self, *error):
        self.virtual.on_resize.remove(self.resized)
        return super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t not in _PLAIN and is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        out = self.virtual.intercept(self, func, args, kwargs)
        if out is NOT_HANDLED:
            out = func(*args, **kwargs)
            self.ops.append(str(func))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if (
                isinstance(leaf, torch.Tensor)
                and getattr(leaf, "fake_device", leaf.device).type == self.virtual.device.type
            ):
                self.see(leaf.untyped_storage())
        return out

    def see(self, storage):
        if storage not in self.sizes and not self.muted:
            self.sizes[storage] = nbytes = [0]
            self.grow(nbytes, storage.nbytes())
            weakref.finalize(storage, self.grow, nbytes, 0)

    def resized(self, storage, size):
        if storage in self.sizes:
            self.grow(self.sizes[storage], size)

    def grow(self, nbytes, size):
        change, nbytes[0] = size - nbytes[0], size
        self.events.append(change)
        self.live += change
        self.peak = max(self.peak, self.live)
