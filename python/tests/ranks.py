"""Processes of one process group that run functions of the tests."""

import os
import traceback

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

SECONDS = 240


def _serve(rank, ranks, backend, store, pipe):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers shards a model over GPUs where it sees some
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            torch.manual_seed(1)
            function(torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu"), *arguments)
            pipe.send(None)
        except BaseException:  # pytest.skip and pytest.fail are none of Exception
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Ranks:
    """`count` processes; run() calls a function of a module in all."""

    def __init__(self, count, backend, folder):
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = []
        for rank, (_, theirs) in enumerate(pipes):
            arguments = (rank, count, backend, folder / "store", theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()

    @property
    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def run(self, function, *arguments):
        """function(device, *arguments) in each process; raises what one of them did, or after SECONDS."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        problems = []
        for rank, pipe in enumerate(self.pipes):
            answered = pipe.poll(SECONDS if not problems else 5)
            problem = pipe.recv() if answered else f"no answer within {SECONDS} s"
            if problem is not None:
                problems.append(f"rank {rank}: {problem}")
        if problems:
            self.stop()  # the others may wait for a message that does not come
            raise AssertionError("\n".join(problems))

    def stop(self):
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
