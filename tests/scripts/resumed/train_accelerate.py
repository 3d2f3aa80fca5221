import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from spotheal.training.integrations.accelerate import resume

torch.manual_seed(7)
inputs = torch.randn(44, 5)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
loader = DataLoader(dataset, batch_size=8, shuffle=True)

accelerator = Accelerator(cpu=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
loop = resume(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
for epoch in loop.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        loop.after_step(loss=loss)
loop.finish()
torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
