"""Fixes what torch would otherwise choose: threads, kernels, precision of matrix products."""

from __future__ import annotations

import torch


def fix(*, threads: int, cuda: bool) -> None:
    """Make this process compute the same bits in every run on the same kind of hardware.

    On CUDA this also needs `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment before CUDA starts; the
    process's entry point sets it.
    """
    torch.set_num_threads(threads)
    if threads == 1 and not cuda:
        return  # one thread adds in one order; and the call below imports torch's compiler, a second of a job's start
    # With more threads, some CPU kernels add in the order in which their threads finish.
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (its stub lacks it)
    if not cuda:
        return
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # The backward passes of these two add with atomics; flash and math remain.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
