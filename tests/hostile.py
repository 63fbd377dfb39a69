"""Names that would do harm in a page that did not escape them, and a job whose module has such a name."""

HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>\"'&{{7*7}}"
JOB = f"""
import torch
from torch import nn
from memfit.job import Job, Loss

NAME = {HOSTILE.replace(".", "_")!r}

class Hostile(Job):
    def nets(self):
        net = nn.Sequential()
        net.add_module(NAME, nn.Linear(64, 64))
        return {{"net": net}}
    def optimizers(self, nets):
        return {{"net": torch.optim.AdamW(nets["net"].parameters())}}
    def batch(self, shape):
        return torch.zeros(shape.items, 64)
    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().sum(), len(batch))
"""
