import random

import numpy as np
import pytest
import torch

# tiny tensors: a second thread costs more than it gives, and the tests may share two cores
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_and_poison():
    """Every test starts from the same seed, and uninitialised float memory reads NaN."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
