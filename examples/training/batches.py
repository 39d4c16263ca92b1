"""The samples of training steps, made by worker processes beside the step."""

import torch
from torch.utils.data import DataLoader


class Batches:
    """of(step) has the samples of a step: a list of tensors [batch, ...] on `device`.

    dataset  of torch.utils.data; sample i is a function of i alone
    indices  indices(step) are those of the samples of this process
    steps    of the run
    workers  processes that make samples ahead of time; 0: the caller's own thread makes them

    Workers change the time alone, not the samples. They are spawned, since a fork of a process with threads
    or a CUDA context is not safe; so `dataset` is pickled, and importing the program may not start a run. On
    CUDA samples come through pinned memory, by copies on the current stream that the host does not wait
    for."""

    def __init__(self, dataset, indices, steps, *, device, workers=0):
        self.dataset, self.indices, self.steps = dataset, indices, steps
        self.device, self.workers = device, workers
        self.next_step, self.iterator = None, None

    def begin(self, step):
        """Starts workers, who make the samples of `step` and of steps after it."""
        self.close()
        self.next_step, self.iterator = step, iter(self._loader(step))

    def of(self, step):
        if step != self.next_step or step >= self.steps:
            self.begin(step)
        parts = next(self.iterator)
        self.next_step = step + 1
        return [part.to(self.device, non_blocking=True) for part in parts]

    def close(self):
        """Ends the workers. A later of() starts new ones."""
        self.next_step, self.iterator = None, None

    def _loader(self, first):
        return DataLoader(
            self.dataset,
            batch_sampler=[self.indices(step) for step in range(first, max(self.steps, first + 1))],
            num_workers=self.workers,
            multiprocessing_context="spawn" if self.workers else None,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # of the workers' seeds, which no sample reads: the run's own stays
        )
