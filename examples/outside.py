"""A script that does not use swarmtrain: torchrun --nproc-per-node 2 outside.py --epochs 4

DistributedDataParallel, DistributedSampler, and its own checkpoints, one per epoch. It learns which arm of a spiral a point is on.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="points of a rank at a time")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    return parser.parse_args()


def make_spiral(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    turns = 3 * math.pi * torch.rand(count, generator=generator).sqrt()
    angles = turns + math.pi * labels
    coordinates = torch.stack([turns * angles.cos(), turns * angles.sin()], dim=1) / 10
    return TensorDataset(coordinates + 0.02 * torch.randn(count, 2, generator=generator), labels)


def save_checkpoint(folder, model, optimizer, epoch):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"epoch-{epoch:03}")


def load_newest_checkpoint(folder, model, optimizer):
    """Load the newest complete checkpoint and return its epoch; 0 if there is none."""
    complete = sorted(file.parent for file in folder.glob("epoch-*/.metadata"))
    if not complete:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(complete[-1].name.removeprefix("epoch-"))


def train_epoch(model, loader, optimizer):
    model.train()
    for coordinates, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(coordinates), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def compute_accuracy(model, data):
    model.eval()
    coordinates, labels = data.tensors
    return (model(coordinates).argmax(dim=1) == labels).double().mean().item()


def main():
    args = parse_args()
    torch.manual_seed(0)
    training, validation = make_spiral(8192, seed=1), make_spiral(1024, seed=2)
    sampler = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first_epoch = load_newest_checkpoint(args.checkpoints, model, optimizer)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        save_checkpoint(args.checkpoints, model, optimizer, epoch + 1)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  validation accuracy {100 * compute_accuracy(network, validation):.1f} %"
            )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()  # here, not in main(): gloo may hang if the model holds the last reference to the group
