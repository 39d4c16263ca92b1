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


@pytest.fixture
def compiled(device):
    """compiled(dtype, operation): skips where the module of the device lacks the dtype."""

    def check(dtype, operation="attention"):
        if str(dtype).removeprefix("torch.") not in kvpolicy._native.types(device.type, operation):
            pytest.skip(f"the {device.type} module has no {dtype} for {operation}")

    return check


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)
