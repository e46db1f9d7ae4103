"""The elastic example: it trains, and goes on after a worker's death."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from tests.launch import LAUNCH_VARIABLE, REPOSITORY, Launch, launch_command, launch_environment

EXAMPLE = REPOSITORY / "examples" / "pytorch_elastic.py"


def kill_rank(rank: int, launch: Launch) -> None:
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            ours = environment.get(LAUNCH_VARIABLE) == launch.mark
            if ours and environment.get("HOROVOD_RANK") == str(rank):
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_goes_on_after_a_death() -> None:
    pytest.importorskip("sklearn")
    command = launch_command(
        2,
        EXAMPLE,
        "--epochs=12",
        hosts="localhost:1,127.0.0.1:1",
        options=["--min-np", "1", "--network-interface", "lo"],
    )
    killed = False
    with Launch(command, launch_environment()) as launch:
        while launch.process.poll() is None:
            if not killed and "epoch 2, 2 workers" in launch.outputs()[0]:
                kill_rank(1, launch)
                killed = True
            time.sleep(0.02)
        out, err = launch.outputs()
    assert launch.process.returncode == 0, out + err
    assert killed
    assert "epoch 12, 1 workers" in out
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", out)]
    assert accuracies[-1] > 0.85, out
    lost = re.search(r"gone: L1 norm ([\d.e+-]+)", out)
    assert lost is not None
    assert float(lost[1]) > 0
