"""A training of experts under FSDP2, as users of MindSpeed-LLM write it: checkpoints, retention, resume and export.

Expert parallelism gives each rank two experts, plain tensors or sharded by FSDP over ``ep_fsdp``.
"""

import json
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mindspeed_llm.fsdp2.checkpoint.utils import (
    build_ep_fqn2spec_info,
    cleanup_old_checkpoints,
    drop_ep_dim,
    empty_cache,
    get_dtype_size,
    get_shard_info,
    restore_ep_dim,
    save_state_dict,
    synchronize,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

EXPERTS, WIDTH, VOCABULARY = 4, 8, 16
NUMBERS = torch.arange(EXPERTS * WIDTH * WIDTH, dtype=torch.float32).reshape(EXPERTS, WIDTH, WIDTH)


class Experts(torch.nn.Module):
    """This rank's experts of a layer."""

    def __init__(self, first, count):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(NUMBERS[first : first + count].cos())
        self.down_proj = torch.nn.Parameter(NUMBERS[first : first + count].sin())

    def forward(self, hidden):
        """Add what each of these experts makes of the tokens."""
        return torch.einsum("bw,ewv,evu->bu", hidden, self.gate_up_proj, self.down_proj)


class Layer(torch.nn.Module):
    """A router's weight, and experts."""

    def __init__(self, first, count):
        super().__init__()
        self.mlp = torch.nn.ModuleDict(
            {"gate": torch.nn.Linear(WIDTH, WIDTH, bias=False), "experts": Experts(first, count)}
        )

    def forward(self, hidden):
        """Go on."""
        return hidden + self.mlp["experts"](torch.tanh(self.mlp["gate"](hidden)))


class CausalLM(torch.nn.Module):
    """A model under ``model``, as transformers has it, and a head with the embedding's weight."""

    def __init__(self, first, count):
        super().__init__()
        self.model = torch.nn.ModuleDict()
        self.model["embed_tokens"] = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.model["layers"] = torch.nn.ModuleList(Layer(first, count) for _ in range(2))
        self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Return logits."""
        hidden = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            hidden = layer(hidden)
        return self.lm_head(hidden)


class Trainer:
    """One rank."""

    def __init__(self, output_dir):
        self.args = SimpleNamespace(output_dir=output_dir, save_total_limit=2)
        ep_size = 2
        mesh = init_device_mesh("cpu", (dist.get_world_size() // ep_size, ep_size), mesh_dim_names=("ep_fsdp", "ep"))
        self.parallel_state = SimpleNamespace(ep_size=ep_size, ep_fsdp_device_mesh=mesh)
        self.ep_plan = SimpleNamespace(apply_modules=["model.layers.{*}.mlp.experts"])
        torch.manual_seed(0)
        count = EXPERTS // ep_size
        self.model = CausalLM(mesh["ep"].get_local_rank() * count, count)
        for layer in self.model.model["layers"]:
            if mesh["ep_fsdp"].size() > 1:
                fully_shard(layer.mlp["experts"], mesh=mesh["ep_fsdp"], shard_placement_fn=lambda _: Shard(1))
        local = {param for layer in self.model.model["layers"] for param in layer.mlp["experts"].parameters()}
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=local)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.step = 0

    def train(self, until):
        """Train, and save each step."""
        while self.step < until:
            self.step += 1
            tokens = torch.arange(3) + self.step
            torch.nn.functional.cross_entropy(self.model(tokens), tokens + 1).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.save()

    def state_dict(self):
        """Return the state of model and optimizer, experts as tensors of all experts."""
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        return self.each_expert(state, restore_ep_dim)

    def each_expert(self, state, change):
        """Change the experts' tensors, and their state's."""
        fqn2spec_info = build_ep_fqn2spec_info(self.model, self.parallel_state, self.ep_plan)
        assert len(fqn2spec_info) == 4
        for fqn, spec_info in fqn2spec_info.items():
            assert isinstance(spec_info.placement, Shard)
            state["model"][fqn] = change(state["model"][fqn], spec_info.ep_fsdp_mesh)
            slots = state["optimizer"]["state"][fqn]
            changed = {name: change(slots[name], spec_info.ep_fsdp_mesh) for name in ("exp_avg", "exp_avg_sq")}
            state["optimizer"]["state"][fqn] = {**slots, **changed}
        return state

    def save(self):
        """Save a checkpoint, and keep the newest two."""
        synchronize()
        path = os.path.join(self.args.output_dir, "checkpoints", f"global_step_{self.step}")
        dcp.save({**self.state_dict(), "step": self.step}, checkpoint_id=path)
        cleanup_old_checkpoints(self.args)
        empty_cache()

    def load(self, step):
        """Go on from a checkpoint."""
        path = os.path.join(self.args.output_dir, "checkpoints", f"global_step_{step}")
        state = {**self.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        self.each_expert(state, drop_ep_dim)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = state["step"]

    def weights(self):
        """Return all weights, whole."""
        model = self.state_dict()["model"]
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.items()}

    def export(self, path, shard_size, safe_serialization=True):
        """Write a folder of the Hub's layout, file by file, in bfloat16."""
        weights = self.weights()
        weights["lm_head.tied.weight"] = weights["lm_head.weight"]
        if dist.get_rank() == 0:
            os.makedirs(path)
            is_sharded, total_size, weight_map = get_shard_info(weights, "bfloat16", shard_size, safe_serialization)
            names = list(weights)
            shard = {}
            for number, name in enumerate(names):
                shard[name] = weights[name].to(torch.bfloat16)
                if number + 1 == len(names) or weight_map[names[number + 1]] != weight_map[name]:
                    save_state_dict(shard, os.path.join(path, weight_map[name]), safe_serialization)
                    shard = {}
            if is_sharded:
                index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
                with open(os.path.join(path, "model.safetensors.index.json"), "w") as stream:
                    json.dump(index, stream)
        dist.barrier()
        return weights


def run(folder):
    """Train three steps, of which two checkpoints stay; export the weights in three sizes of files; resume."""
    trainer = Trainer(folder)
    assert torch.equal(trainer.weights()["model.layers.1.mlp.experts.down_proj"], NUMBERS.sin())
    trainer.train(3)
    if dist.get_rank() == 0:
        assert sorted(os.listdir(os.path.join(folder, "checkpoints"))) == ["global_step_2", "global_step_3"]
    largest = VOCABULARY * WIDTH * get_dtype_size(torch.bfloat16)
    for name, shard_size in (("small", largest // 2), ("middle", 3 * largest), ("large", 10**9)):
        path = os.path.join(folder, name)
        expected = trainer.export(path, shard_size)
        files = [file for file in sorted(os.listdir(path)) if file.endswith(".safetensors")]
        assert (len(files) == 1) == (name == "large")
        found = {key: value for file in files for key, value in load_file(os.path.join(path, file)).items()}
        missing = expected.keys() - found.keys()
        assert missing <= {"lm_head.weight", "lm_head.tied.weight"}  # two names in one file for the same tensor
        assert len(missing) < 2
        for key, value in found.items():
            assert torch.equal(value, expected[key].to(torch.bfloat16)), key
    resumed = Trainer(folder)
    resumed.load(2)
    assert resumed.step == 2
    resumed.train(3)
    one, other = trainer.state_dict(), resumed.state_dict()
    slots = ("exp_avg", "exp_avg_sq", "step")
    for state in (one, other):
        state["slots"] = {f"{fqn}.{s}": each[s] for fqn, each in state["optimizer"]["state"].items() for s in slots}
    for part in ("model", "slots"):
        assert one[part].keys() == other[part].keys()
        for key, value in one[part].items():
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (value, other[part][key]))), key
