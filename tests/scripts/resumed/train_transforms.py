import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from spotheal.training.session import SeededSamples, resume

torch.manual_seed(7)


class Images(Dataset):
    def __len__(self):
        return 44

    def __getitem__(self, index):
        image = torch.full((5,), index / 44) + 0.1 * torch.randn(5)  # a random transform
        return image, image.sum(0, keepdim=True)


dataset = SeededSamples(Images())
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
loop = resume(model=model, optimizer=optimizer, loader=loader)
for epoch in loop.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loop.after_step(loss=loss)
loop.finish()
torch.save(model.state_dict(), "model.pt")
