"""Devices and seeds."""

import pytest
import torch

import kvpolicy


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """CPU, and CUDA where there is a GPU and the build has the module."""
    if request.param == "cuda" and not (torch.cuda.is_available() and kvpolicy.has_cuda()):
        pytest.skip("no GPU, or no CUDA module")
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)
