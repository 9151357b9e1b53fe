"""Gangs of PyTorch over gloo: ranks meet, train together, fail together and go on from a checkpoint.

PyTorch is Debian's, which only the ranks of these tests see: no other test has it, nor has the virtual environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support import ROOT, debian_torch, missing

import skyinfra as sky

STEPS = 12


@pytest.fixture(scope="session")
def variables(tmp_path_factory) -> dict[str, str]:
    """The environment in which PyTorch can be imported: as it is where the virtual environment has one."""
    if importlib.util.find_spec("torch"):
        return {"PYTHONPATH": str(ROOT)}
    if debian_torch.there():
        return debian_torch.variables(tmp_path_factory.mktemp("torch"))
    if not debian_torch.UNPACKED.is_dir():
        missing("PyTorch, which `make torch` unpacks,")
    pytest.skip(f"Debian's PyTorch is not for Python {sysconfig.get_python_version()}")


def launch(pool, target, *args, **options):
    """A gang whose ranks share GPUs, as partitions do, which it warns of."""
    with pytest.warns(sky.GangWarning):
        return pool.launch(target, *args, **options)


def reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(3) * dist.get_rank()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total[0])


def fail() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        raise FloatingPointError("the loss is not a number")
    dist.all_reduce(torch.ones(1))


def train(folder: str | None = None, killed: bool = False) -> tuple[int, list[float], list[float]]:
    """Fits a line of eight weights, each rank with its part of the data.

    With *folder*, each step is saved there; *killed*: the last rank dies in the midst of the first start. The step at
    which it began, the losses, and the weights.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.randn(64, 8)
    wanted = data @ torch.arange(8.0).unsqueeze(1)
    # What the others get from rank 0 counts.
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    checkpoints = sky.SpotCheckpointer(folder) if folder else None
    state, began = (checkpoints and checkpoints.load_latest()) or (None, 0)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in range(began, STEPS):
        if killed and rank == ranks - 1 and step == STEPS // 2 and sky.gang().restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data[rank::ranks]), wanted[rank::ranks])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if checkpoints and rank == 0:
            checkpoints.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step + 1)
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    dist.destroy_process_group()
    return began, losses, weights


def test_pytorch_ranks_meet_with_gloo(pool, variables):
    assert launch(pool, reduce, env=variables) == [6.0] * 4


@pytest.mark.slow
def test_ranks_train_one_model(pool, variables):
    trained = launch(pool, train, env=variables)
    for began, losses, weights in trained:
        assert (began, len(losses)) == (0, STEPS)
        assert losses[-1] < losses[0] / 10
        assert weights == trained[0][2]
    # The mean of the gradients of all parts is the gradient of the whole.
    [(_, _, alone)] = pool.launch(train, env=variables, nodes=1, per_node=1)
    assert trained[0][2] == pytest.approx(alone, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint_after_a_rank_was_killed(pool, variables, tmp_path):
    whole = launch(pool, train, env=variables, nodes=1)
    folder = tmp_path / "checkpoints"
    resumed = launch(pool, train, str(folder), killed=True, env=variables, nodes=1, max_restarts=1)
    assert [began for began, _, _ in resumed] == [STEPS // 2] * 2
    assert [weights for _, _, weights in resumed] == [weights for _, _, weights in whole]
    assert [losses for _, losses, _ in resumed] == [losses[STEPS // 2 :] for _, losses, _ in whole]
    assert (folder / "latest").readlink() == Path(f"step-{STEPS:012d}.pt")


@pytest.mark.slow
def test_the_rank_that_failed_is_named_and_not_those_whose_connections_broke(pool, variables):
    with pytest.raises(FloatingPointError, match="the loss is not a number") as caught:
        launch(pool, fail, env=variables)
    assert caught.value.__notes__ == ["Raised by rank 2 of fail, on slot n1/0 of node n1."]


SCRIPT = """
import sys
steps, sys.path[:0] = int(sys.argv[1]), sys.argv[2].split(':')
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(64, 8)
wanted = data.sum(1, keepdim=True)
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = slice(dist.get_rank(), None, dist.get_world_size())
for step in range(steps):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(data[part]), wanted[part])
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss.item())
print("weights", [value for parameter in model.parameters() for value in parameter.flatten().tolist()])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_trains_from_the_command_line(fleets, variables, monkeypatch, tmp_path):
    # The command takes no variables for the ranks: those of the fleet are theirs.
    monkeypatch.setenv("LD_LIBRARY_PATH", variables.get("LD_LIBRARY_PATH", ""))
    (tmp_path / "fleet.json").write_text(json.dumps(fleets().manifest.to_json()))
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "skyinfra.cli", "run", "fleet.json", "--torchrun", "train.py", str(STEPS)]
    command.append(variables["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses: dict[str, list[float]] = {}
    for rank, loss in re.findall(r"^(\d): step \d+ loss (\S+)$", done.stdout, re.MULTILINE):
        losses.setdefault(rank, []).append(float(loss))
    assert sorted(losses) == ["0", "1", "2", "3"]
    for found in losses.values():
        assert len(found) == STEPS
        assert found[-1] < found[0] / 10
    weights = re.findall(r"^\d: weights (.*)$", done.stdout, re.MULTILINE)
    assert len(weights) == 4
    assert len(set(weights)) == 1
