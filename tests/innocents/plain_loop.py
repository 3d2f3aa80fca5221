"""What most people write: a loop that saves to ./checkpoints, prints its loss and resumes from the newest save."""

import argparse
import os
import time

import torch

arguments = argparse.ArgumentParser()
arguments.add_argument("epochs", type=int)
arguments.add_argument("seconds", type=float)
options = arguments.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(256, 16)
targets = inputs.sum(dim=1, keepdim=True)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

os.makedirs("checkpoints", exist_ok=True)
path = "checkpoints/last.pt"
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
    print(f"resuming at epoch {first}")

for epoch in range(first, options.epochs):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(options.seconds)
    print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
