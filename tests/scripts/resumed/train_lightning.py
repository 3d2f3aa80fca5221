import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from spotheal.training.integrations.lightning import ExactSampler, SpotCheckpoints, exact_loader

seed_everything(7)


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


inputs = torch.randn(44, 5)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
task = Task()
loader = exact_loader(dataset, ExactSampler(len(dataset)), batch_size=8)
spot = SpotCheckpoints()
trainer = Trainer(max_epochs=3, logger=False, callbacks=[spot], plugins=[spot.io], enable_checkpointing=False)
trainer.fit(task, loader, ckpt_path=spot.newest(), weights_only=False)
torch.save(task.state_dict(), "model.pt")
