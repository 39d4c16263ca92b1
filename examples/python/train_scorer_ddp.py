#!/usr/bin/env python3
"""Trains KVpop's scorers on several GPUs, or processes of a CPU:

    torchrun --nproc-per-node 2 train_scorer_ddp.py --out scorers.safetensors

Each process takes its share of a step's samples. DistributedDataParallel averages the gradients; with --fsdp
FSDP2 does, and also shards the weights and the optimizer's state. Losses and weights are those of one
process, without torchrun, to rounding. Samples are synthetic: keys with a large first element draw attention.
In their place comes q, k and v of a layer of your model, after RoPE.
"""

import argparse
import os

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import kvpolicy as kvp

LAYERS, HEADS, GROUP, TOKENS, DIM = 2, 2, 2, 192, 16
WINDOW, SINKS, BUDGET = 8, 2, 22


def sample(index, device):
    """q, k, v of each layer for one sample, the same in every process."""
    generator = torch.Generator().manual_seed(index)
    shape = (LAYERS, 1, HEADS, TOKENS, DIM)
    k, v = torch.randn(2, *shape, generator=generator)
    q = torch.randn(LAYERS, 1, HEADS * GROUP, TOKENS, DIM, generator=generator)
    q[..., 0] = 4
    return q.to(device), k.to(device), v.to(device)


class Training(torch.nn.Module):
    """The loss of samples, as a module: what DDP and FSDP2 wrap."""

    def __init__(self, scorers):
        super().__init__()
        self.scorers = scorers

    def forward(self, samples):
        """The sum of the samples' losses, each the mean over layers."""
        total = 0.0
        for q, k, v in samples:
            for layer in range(LAYERS):
                policy = self.scorers.policy(layer, BUDGET)
                target = kvp.future_mass(q[layer], k[layer], WINDOW, beta=2.0)
                loss, _ = kvp.boundary_loss(policy, policy.scorer(k[layer], v[layer]), target)
                total = total + loss / LAYERS
        return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="samples per step, of all processes")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--out", help="where to write the scorers")
    arguments = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if arguments.batch < ranks:
        parser.error(f"--batch: {arguments.batch} is not allowed; it must be one sample per process, {ranks}")
    device = torch.device("cpu")
    if torch.cuda.is_available() and kvp.has_cuda():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(1)  # the same first weights everywhere
    layers = [kvp.mLSTMScorer(HEADS, DIM, delay=WINDOW) for _ in range(LAYERS)]
    scorers = kvp.Scorers(layers, window=WINDOW, sinks=SINKS).to(device)
    training = Training(scorers)
    if ranks > 1 and arguments.fsdp:
        fully_shard(training)
    elif ranks > 1:
        ids = [device.index] if device.type == "cuda" else None
        training = torch.nn.parallel.DistributedDataParallel(training, device_ids=ids)
    # The loss compares scores of one head, so the gradient of a bias is rounding: eps keeps it small.
    # The decay has a rate of its own.
    optimizer = torch.optim.AdamW(scorers.parameter_groups(arguments.lr), eps=1e-5)

    for step in range(arguments.steps):
        numbers = range(step * arguments.batch + rank, (step + 1) * arguments.batch, ranks)
        loss = training([sample(number, device) for number in numbers]) / arguments.batch
        optimizer.zero_grad()
        (loss * ranks).backward()  # gradients are averaged over processes, and are to be sums
        optimizer.step()
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if arguments.out and (rank == 0 or arguments.fsdp):
        scorers.save(arguments.out)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
