"""For each rule, code with the mistake (marked ``# HERE``) and near code without it."""

WRONG: dict[str, list[str]] = {
    "constant-accumulation": [
        """
loader = DataLoader(data, batch_size=8)
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4  # HERE
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
""",
        """
loader = DataLoader(data, batch_size=8)
for i, batch in enumerate(loader):
    loss = model(batch)
    loss = loss * (1 / args.accum)  # HERE
    loss.backward()
""",
        """
loader = DataLoader(data, batch_size=8, shuffle=True)
for step, batch in enumerate(loader):
    loss = model(batch)
    loss = loss / accumulation_steps  # HERE
    loss.backward()
    if (step + 1) % accumulation_steps == 0:
        optimizer.step()
""",
        """
loader = DataLoader(data, 8)
for i, batch in enumerate(tqdm(loader)):
    (criterion(model(batch)) / 1).sum()
    loss = model(batch)
    scaler.scale(loss / 4).backward()  # HERE
    if i % 4 == 3:
        scaler.step(optimizer)
""",
        """
class Run:
    def fit(self, loader):
        loader = DataLoader(self.data, batch_size=8, drop_last=False)
        for batch in loader:
            loss = self.model(batch)
            loss /= self.grad_accum  # HERE
            self.accelerator.backward(loss)
""",
    ],
    "gradients-in-validation": [
        """
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
    validate(model)  # HERE
""",
        """
def train(model):
    for step, batch in enumerate(loader):
        model.zero_grad()
        model(batch).backward()
        optimizer.step()
        if step % 100 == 0:
            run_validation(model)  # HERE
""",
    ],
    "validation-with-autograd": [
        """
def validate(model, loader):
    model.eval()
    for batch in loader:
        total += model(batch).item()  # HERE
""",
        """
for epoch in range(3):
    net.train()
    for batch in loader:
        net(batch).backward()
    net.eval()
    for batch in test:
        output = net(batch)  # HERE
""",
    ],
    "kept-loss": [
        """
for batch in loader:
    loss = model(batch)
    loss.backward()
    losses += [loss]  # HERE
""",
        """
optimizer = SGD(model.parameters(), lr=0.1)
for batch in loader:
    output = model(batch)
    loss = output.mean()
    loss.backward()
    outputs.append(output)  # HERE
""",
        """
class Run:
    def step(self, batch):
        loss = self.model(batch).mean()
        loss.backward()
        self.losses.append(loss)  # HERE

    def fit(self):
        for batch in self.loader:
            self.step(batch)
""",
        """
losses = []
for batch in loader:
    loss = model(batch)
    loss.backward()
    losses.append(loss)  # HERE
""",
        """
class T:
    def fit(self):
        for batch in self.loader:
            loss = self.net(batch)
            self.fabric.backward(loss)
            self.history.append(loss)  # HERE
""",
    ],
    "summed-loss": [
        """
for batch in loader:
    loss = model(batch)
    loss.backward()
    smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss  # HERE
""",
        """
total = 0
for batch in loader:
    loss = model(batch)
    loss.backward()
    total += loss  # HERE
""",
        """
for epoch in range(3):
    running = 0.0
    for batch in loader:
        loss = model(batch)
        loss.backward()
        running = running + loss * len(batch)  # HERE
""",
    ],
    "no-set-epoch": [
        """
sampler = DistributedSampler(data)  # HERE
for epoch in range(3):
    for batch in DataLoader(data, sampler=sampler, batch_size=2, drop_last=True):
        model(batch).backward()
""",
    ],
    "sharded-twice": [
        """
accelerator = Accelerator()
data = data.shard(accelerator.num_processes, accelerator.process_index)
loader = DataLoader(data, batch_size=8)
model, loader = accelerator.prepare(model, loader)  # HERE
""",
        """
accelerator = Accelerator()
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, sampler=sampler, batch_size=2)
model, loader = accelerator.prepare(model, loader)  # HERE
""",
        """
data = split_dataset_by_node(data, rank, world)
sampler = DistributedSampler(data, shuffle=False)  # HERE
""",
    ],
    "average-on-every-rank": [
        """
import torch.distributed as dist
dist.init_process_group("nccl")
ema_model = copy.deepcopy(model)  # HERE
""",
        """
accelerator = Accelerator()
if args.use_ema:
    ema = EMAModel(unet.parameters())  # HERE
""",
    ],
    "default-reentrant": [
        """
from torch.utils.checkpoint import checkpoint
x = checkpoint(block, x)  # HERE
""",
        """
import torch.utils.checkpoint as cp
x = cp.checkpoint_sequential(blocks, 4, x)  # HERE
""",
        """
import torch
x = torch.utils.checkpoint.checkpoint(block, x)  # HERE
""",
    ],
    "empty-cache-in-loop": [
        """
from torch.cuda import empty_cache
for batch in loader:
    model(batch).backward()
    empty_cache()  # HERE
""",
        """
def step(batch):
    model(batch).backward()
    torch.cuda.empty_cache()  # HERE

for batch in loader:
    step(batch)
""",
        """
for batch in loader:
    model(batch).backward()
    torch.cuda.empty_cache()  # HERE
""",
    ],
}

RIGHT: dict[str, list[str]] = {
    "constant-accumulation": [
        """
loader = DataLoader(data, batch_size=8, drop_last=True)
for step, batch in enumerate(loader):
    loss = model(batch) / accumulation_steps
    loss.backward()
""",
        """
for micro in range(gradient_accumulation_steps):
    loss = model(get_batch()) / gradient_accumulation_steps
    loss.backward()
""",
        """
loader = DataLoader(data, batch_size=8)
for batch in loader:
    loss = model(batch).sum() / batch.valid
    loss.backward()
""",
    ],
    "gradients-in-validation": [
        """
for epoch in range(3):
    for batch in loader:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    validate(model)
""",
        """
for batch in loader:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()
model.eval()
""",
    ],
    "validation-with-autograd": [
        """
@torch.no_grad()
def validate(model, loader):
    model.eval()
    for batch in loader:
        model(batch)
""",
        """
def validate(model, loader):
    model.eval()
    with torch.inference_mode():
        for batch in loader:
            model(batch)
""",
        """
def validate(model, loader):
    model.eval()
    for batch in loader:
        model(batch)
with torch.no_grad():
    validate(model, loader)
""",
        """
teacher.eval()
for batch in loader:
    target = teacher(batch)
    student(batch, target).backward()
""",
        """
vae.eval()
for parameter in vae.parameters():
    parameter.requires_grad = False
for batch in loader:
    vae(batch)
""",
    ],
    "kept-loss": [
        """
def append(item):
    pass

for batch in loader:
    loss = model(batch)
    loss.backward()
    append(loss)
""",
        """
optimizer = SGD(model.parameters(), lr=0.1)
for batch in loader:
    ids = tokenizer(batch)
    loss = model(ids)
    loss.backward()
    seen.append(ids)
""",
        """
class Run:
    def step(self, batch):
        loss = self.model(batch).mean()
        loss.backward()
        self.losses.append(loss)

    def fit(self):
        for batch in self.loader:
            self.step(batch)
            self.log()

    def log(self):
        self.losses.clear()
""",
        """
losses = []
for batch in loader:
    loss = model(batch)
    loss.backward()
    losses.append(loss.item())
""",
        """
losses = []
for batch in loader:
    loss = model(batch)
    loss.backward()
    loss = loss.detach()
    losses.append(loss)
""",
        """
for batch in loader:
    parts = []
    for head in heads:
        part = head(batch)
        parts.append(part)
    loss = torch.stack(parts).sum()
    loss.backward()
""",
    ],
    "summed-loss": [
        """
for batch in loader:
    loss = model(batch)
    loss.backward()
    smooth = 0.9 * smooth.detach() + 0.1 * loss
""",
        """
for batch in loader:
    total = 0
    for head in heads:
        total += head(batch)
    total.backward()
""",
        """
for batch in loader:
    loss = model(batch)
    loss.backward()
    total += loss.detach().float()
""",
        """
for batch in loader:
    loss = first(batch)
    loss += second(batch)
    loss.backward()
""",
    ],
    "no-set-epoch": [
        """
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in DataLoader(data, sampler=sampler):
        model(batch).backward()
""",
        """
import lightning as L
sampler = DistributedSampler(data)
for batch in DataLoader(data, sampler=sampler):
    model(batch).backward()
""",
    ],
    "sharded-twice": [
        """
accelerator = Accelerator()
loader = DataLoader(data, batch_size=2)
loader = accelerator.prepare(loader)
""",
    ],
    "average-on-every-rank": [
        """
accelerator = Accelerator()
if accelerator.is_main_process:
    ema = EMA(model)
""",
        "ema = EMA(model)\n",
    ],
    "default-reentrant": [
        """
from torch.utils.checkpoint import checkpoint
x = checkpoint(block, x, use_reentrant=False)
x = checkpoint(block, x, **options)
""",
        "x = store.checkpoint(block)\n",
    ],
    "empty-cache-in-loop": [
        """
def step(batch):
    model(batch).backward()
    torch.cuda.empty_cache()

step(first)
for batch in loader:
    other(batch)
""",
        """
for step, batch in enumerate(loader):
    try:
        model(batch).backward()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    if step % 100 == 0:
        torch.cuda.empty_cache()
torch.cuda.empty_cache()
""",
    ],
}
