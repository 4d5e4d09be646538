"""Processes of one group on this machine, forked from a process that has imported everything."""

import faulthandler
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 60.0
ON_CUDA = os.environ.get("FORKPOINT_RANKS_DEVICE", "cpu") == "cuda"
"""Ranks hold their models on GPUs, each on one of its own, by NCCL. With
PYTORCH_NVML_BASED_CUDA_CHECK=1 torch can be asked for GPUs before processes are forked."""


class RankFailed(AssertionError):
    """A process of the group raised, died, or did not end in time."""


def launched(*arguments: str) -> dict[str, Any]:
    """The line of JSON that `python -m` prints on two ranks of torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = subprocess.run(
        [sys.executable, *launcher, *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """`work(*args)` in `size` processes, each a rank of one group; what each returned.

    Raises RankFailed with the tracebacks, or with what is known of ranks that had to be killed.
    """
    if ON_CUDA and torch.cuda.is_initialized():
        raise RankFailed("this process uses CUDA already; run this test in a process of its own")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers, children, stacks = [], [], []  # no pipes, which hold 64 KB until they are read
    for rank in range(size):
        answers.append(os.memfd_create("answer"))
        stacks.append(os.memfd_create("stacks"))
        child = os.fork()
        if child == 0:
            _run_here(rank, size, port, answers[-1], stacks[-1], work, args)
        children.append(child)
    ended = _wait(children, limit_s)
    results, failures = [], []
    for rank, (answer, stack, status) in enumerate(zip(answers, stacks, ended, strict=True)):
        with os.fdopen(answer, "rb") as told, os.fdopen(stack) as died:
            for file in (told, died):
                file.seek(0)
            content = told.read()
            how = f"ended with {status}\n{died.read()}"
        done, value = pickle.loads(content) if content else (False, how)
        results.append(value)
        if not done:
            failures.append(f"rank {rank}: {value}")
    if failures:
        raise RankFailed("\n".join(failures))
    return results


def _wait(children: list[int], limit_s: float) -> list[str]:
    """How each child ended; those that have not after the limit are killed."""
    end = time.monotonic() + limit_s
    found = dict.fromkeys(children, "")
    while not all(found.values()):
        for child in [c for c, how in found.items() if not how]:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                found[child] = f"exit status {os.waitstatus_to_exitcode(status)}"
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                found[child] = f"killed after {limit_s:.0f} s"
        time.sleep(0.01)
    return [found[child] for child in children]


def _run_here(
    rank: int,
    size: int,
    port: int,
    told: int,
    stack: int,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    code = 1
    faulthandler.enable(stack)  # of a signal; ranks may be meant to fail, so it is not printed here
    # In the background of a shell it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of newer transformers, and of peft with these.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    # Of the first product within a backward's own thread.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
    try:
        join(rank, size, port, timeout_s=40)
        answer = (True, work(*args))
        dist.barrier()
        code = 0
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(told, "wb") as file:
        file.write(pickle.dumps(answer))
    os._exit(code)


def join(rank: int, size: int, port: int, *, timeout_s: float) -> None:
    """Begin the default group of these ranks."""
    backend = "gloo"
    if ON_CUDA:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def device() -> torch.device:
    """Of this rank's model; of a process that is no rank, the CPU."""
    if ON_CUDA and dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
