"""What the tests of payload share."""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import torch

#: What trainers keep in common state and objects.
STATES: dict[str, Any] = {
    "megatron": {
        "args": argparse.Namespace(
            lr=1e-4, params_dtype=torch.bfloat16, data_path=["a", 0.5], seed=None, betas=(0.9, 0.95)
        ),
        "rng_state": [
            {
                "random_rng_state": random.Random(1).getstate(),
                "np_rng_state": np.random.RandomState(1).get_state(),
                "torch_rng_state": torch.Generator().manual_seed(1).get_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
            }
        ],
        "optimizer": {"optimizer": {"param_groups": [{"lr": 1e-3, "step": torch.tensor(3.0), "params": [0, 1]}]}},
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 1 << 40},
        "checkpoint_version": 3.0,
        "iteration": 100,
        "num_floating_point_operations_so_far": 10**22,
    },
    "torchtitan": {
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(1 << 40)},
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1], "lr_lambdas": [None], "verbose": False},
        "dataloader": {"dp_rank_0": bytes(range(256)) * 100, "world_size": 2},
    },
    "lightning": {
        "epoch": 0,
        "global_step": 5,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": torch.nn.BatchNorm1d(2).state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_k_models": {"/a/b.ckpt": torch.tensor(0.5)},
                "kth_value": torch.tensor(float("inf")),
            }
        },
        "lr_schedulers": [
            torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [3, 3, 5]).state_dict()
        ],
        "hyper_parameters": {"lr": 0.1, "betas": (0.9, 0.99)},
    },
    "transformers": {
        "trainer_state": {
            "epoch": 1.5,
            "log_history": [{"loss": float("nan"), "step": 1}],
            "best_metric": np.float64(0.3),
        },
        "rng": {
            "python": random.Random(2).getstate(),
            "numpy": np.random.RandomState(2).get_state(),
            "cpu": torch.get_rng_state(),
        },
        "generator": np.random.default_rng(3).bit_generator.state,
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.ones(1)])).state_dict(),
    },
}
