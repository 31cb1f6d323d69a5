"""Replicas of one rank each under torchft itself: lighthouse, managers, quorums, and states handed over by HTTP."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.manager import CheckpointConfig, CheckpointManager, FaultTolerance, PerRank
from tests.manager.training import WIDTH, Loader, Progress

TIMEOUT = dt.timedelta(seconds=20)


class TorchftReplica:
    """A training whose gradients torchft averages, and whose steps it commits.

    Args:
        folder: Of the checkpoints.
        replica: Its number.
        group: This rank alone.
        lighthouse: The address of torchft's.
        mode: Of the CheckpointManager.
    """

    def __init__(self, folder: str, replica: int, group: Any, lighthouse: str, mode: str) -> None:
        from torchft import Manager, Optimizer, ProcessGroupGloo

        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.quorum = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{replica}",
            hostname="localhost",
            heartbeat_interval=dt.timedelta(milliseconds=50),
        )
        torch.manual_seed(replica)  # replicas begin with other weights, until one takes over the other's
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.optimizer = Optimizer(self.quorum, torch.optim.AdamW(self.model.parameters(), lr=0.02))
        self.loader, self.progress = Loader(replica), Progress()
        self.healed: list[tuple[int, int]] = []
        self.manager = CheckpointManager(
            CheckpointConfig(folder=folder, interval=4, async_mode=mode),
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "dataloader": PerRank(self.loader),
                "train_state": self.progress,
                "torchft": self.quorum,  # its count of steps
            },
            group,
            fault_tolerance=FaultTolerance(
                self.quorum, replica, lambda step: self.healed.append((step, self.loader.position))
            ),
        )

    def step(self) -> int:
        """Train a step, with whoever is there; how many took part."""
        before = self.quorum.current_step()
        self.optimizer.zero_grad()
        self.model(self.loader.batch()).square().mean().backward()
        for param in self.model.parameters():
            self.quorum.allreduce(param.grad).wait()
        self.optimizer.step()
        if self.quorum.current_step() == before:
            return 0
        self.progress.step += 1
        self.manager.save(self.progress.step)
        return self.quorum.num_participants()

    def run(self, until: int) -> None:
        """Train to a step."""
        while self.progress.step < until:
            self.step()

    def weights(self) -> list[list[float]]:
        """Parameters and moments."""
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.parameters(), *(tensor for state in states for tensor in state.values())]
        return [tensor.flatten().tolist() for tensor in tensors]

    def close(self) -> None:
        """End, as a process would."""
        self.manager.close()
        self.quorum.shutdown(wait=False)


def lost_and_healed(folder: str, mode: str) -> dict[str, Any]:
    """Both train; replica 1 is lost after step 6; replica 0 goes on; replica 1 comes back, and both train 4 steps."""
    replica = dist.get_rank()
    group = dist.new_group([replica], use_local_synchronization=True)
    lighthouse, address = _lighthouse(replica)
    training = TorchftReplica(folder, replica, group, address, mode)
    dist.barrier()  # who is known to be alive is waited for
    training.run(6)
    found: dict[str, Any] = {"begun": training.healed}
    if replica == 1:
        training.close()
        dist.barrier()  # replica 0 has gone on alone
        training = TorchftReplica(folder, replica, group, address, mode)
        found["loaded"] = training.manager.load(), training.progress.step, training.loader.position
        dist.barrier()
        while not training.healed:
            training.step()
        found["healed"] = training.healed[0]
        end = training.progress.step + 4
    else:
        training.run(9)
        training.manager.wait()
        found["alone"] = training.quorum.num_participants()
        dist.barrier()
        dist.barrier()  # replica 1 has loaded
        while training.step() != 2:  # until both take part
            time.sleep(0.02)
        end = training.progress.step + 3
    training.run(end)
    found |= {"weights": training.weights(), "step": training.progress.step, "place": training.loader.position}
    found["counted"] = training.quorum.current_step()
    dist.barrier()
    training.close()
    dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()
    return found | {"steps": sorted(path.name for path in Path(folder).iterdir())}


def _lighthouse(replica: int) -> tuple[Any, str]:
    """torchft's, in the process of replica 0, and its address."""
    from torchft.coordination import LighthouseServer

    server = None
    if replica == 0:
        server = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20, heartbeat_timeout_ms=1500
        )
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, server.address() if server is not None else None)
    return server, everyone[0]
