"""The forward and backward pass of a training step as one CUDA graph.

Kernels of a small model take less time than their launches from Python. A graph launches all kernels of a
pass by one call."""

import torch

WARM_UP = 3  # steps before a capture, in which libraries allocate what they keep


class StepGraph:
    """The passes of one method, captured where they repeat.

    run(compute, ids, weights, key) has the result of compute(ids, weights): a forward and backward pass that
    returns {name: scalar} and leaves gradients in `parameters`. Gradients are overwritten, not accumulated.

    key       hashable: what Python decides in the pass, such as the budget. The first WARM_UP passes in a row
              of one key and shape run from Python; the next one is captured and replayed. Another key or
              shape drops the graph. None: the pass runs from Python.

    A replay repeats the kernels of the captured pass on new ids and weights, and runs no Python. So `compute`
    may not synchronize with the device, and the next replay overwrites the scalars, the gradients, and the
    tensors that the method kept of the pass. Work is ordered on the current stream."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.key, self.passes, self.graph = None, 0, None
        self.ids, self.weights, self.losses, self.gradients = None, None, None, None
        self.stream = None  # of all passes: autograd remembers on which stream a gradient is added up

    def run(self, compute, ids, weights, key):
        if key is None or (key, ids.shape) != self.key:
            self.key, self.passes = None if key is None else (key, ids.shape), 0
            self.graph, self.losses, self.gradients = None, None, None
        if key is None or self.passes < WARM_UP:
            self.passes += 1
            return self._beside(compute, ids, weights)
        if self.graph is None:
            self._capture(compute, ids, weights)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        return self.losses

    def _beside(self, compute, ids, weights):
        """A pass from Python, on the stream of captures; the current stream waits for it."""
        current = torch.cuda.current_stream()
        self.stream = torch.cuda.Stream() if self.stream is None else self.stream
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self._clear()
            losses = compute(ids, weights)
        current.wait_stream(self.stream)
        return losses

    def _clear(self):
        for parameter in self.parameters:
            parameter.grad = None

    def _capture(self, compute, ids, weights):
        self._clear()
        self.ids, self.weights = ids.clone(), weights.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, as the one that pins the next samples does.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            losses = compute(self.ids, self.weights)
            self.losses = {name: torch.as_tensor(value).detach() for name, value in losses.items()}
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.graph = graph
