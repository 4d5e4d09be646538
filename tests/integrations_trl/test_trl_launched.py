"""Two processes that `accelerate launch` starts, by FSDP version 2 and by DDP, beside stock TRL."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched_trl.py")
ARGUMENTS = {
    "ddp": ["--multi_gpu"],
    "fsdp": [
        *("--use_fsdp", "--fsdp_version", "2"),
        *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        *("--fsdp_cpu_ram_efficient_loading", "false"),
    ],
}
LIMIT_S = 400.0


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("way", ARGUMENTS)
def test_accelerate_launch(way: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *ARGUMENTS[way]),
        *("--num_processes", "2", "--num_machines", "1", "--main_process_port", str(port)),
        *("--mixed_precision", "no", "--dynamo_backend", "no", str(SCRIPT), way, str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if way == "fsdp":
        environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # A group of its own, which ends with its launcher whatever happens.
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            said, _ = launcher.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(launcher.pid, 9)
            raise
    assert launcher.returncode == 0, said[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for results in ranks:
        for name, found in results.items():
            if "bf16" in name:
                # Of stock's own distance from float32.
                assert 1e-3 < found["stock"] < 0.1 and found["ours"] < 1.5 * found["stock"], name
            else:
                assert found["apart"] < 2e-6 and found["metrics"] < 1e-5, (name, found)
            assert found["computed"] < found["given"], name
    assert ranks[0]["dpo"]["given"] != ranks[1]["dpo"]["given"], "ranks have rows of other lengths"
