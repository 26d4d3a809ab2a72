"""A script from outside, which has never heard of swarmtrain: torchrun --nproc-per-node 2 outside.py --epochs 4

DistributedDataParallel, DistributedSampler, and checkpoints of its own, one an epoch. It learns which arm of a spiral a point is on.
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


def spiral(points, seed):
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(0, 2, (points,), generator=generator)
    turns = 3 * math.pi * torch.rand(points, generator=generator).sqrt()
    angles = turns + math.pi * arms
    places = torch.stack([turns * angles.cos(), turns * angles.sin()], dim=1) / 10
    return TensorDataset(places + 0.02 * torch.randn(points, 2, generator=generator), arms)


def save(folder, model, optimizer, epoch):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"epoch-{epoch:03}")


def load_newest(folder, model, optimizer):
    """Load the newest whole checkpoint, and return its epoch; 0 if there is none."""
    whole = sorted(file.parent for file in folder.glob("epoch-*/.metadata"))
    if not whole:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(whole[-1].name.removeprefix("epoch-"))


def train_epoch(model, loader, optimizer):
    model.train()
    for places, arms in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(places), arms)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    places, arms = data.tensors
    return (model(places).argmax(dim=1) == arms).double().mean().item()


def main():
    args = parse_args()
    torch.manual_seed(0)
    training, held_out = spiral(8192, seed=1), spiral(1024, seed=2)
    sampler = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    done = load_newest(args.checkpoints, model, optimizer)
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        save(args.checkpoints, model, optimizer, epoch + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  held-out accuracy {100 * accuracy(network, held_out):.1f} %")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()  # here and not in main(): gloo may wait for ever if the model is the last to have the group
