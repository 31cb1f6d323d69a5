"""What trainings make of a model of transformers: codes in the place of its weights, and adapters of PEFT."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Rows and columns of a block that has a scale of its own.
_BLOCK = (16, 16)
_LARGEST = 448  # of float8_e4m3fn


def quantize_to_nf4(model: Any) -> None:
    """Make NF4 weights of torchao's of the layers but the output's, frozen."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            values = to_nf4(module.weight.detach(), block_size=32, scaler_block_size=2)
            module.weight = torch.nn.Parameter(values, requires_grad=False)


def quantize_to_fp8(model: Any) -> None:
    """Make the layers but the output's those of transformers with 8-bit weights and block scales, frozen.

    They are DeepSeek-V3's ``weight`` and ``weight_scale_inv``; ``config.json`` says so.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    values = {name: tensor.detach() for name, tensor in model.named_parameters()}
    config = FineGrainedFP8Config(weight_block_size=_BLOCK, modules_to_not_convert=["lm_head", "gate"])
    replace_with_fp8_linear(model, config.modules_to_not_convert, config, pre_quantized=True)
    model.config.quantization_config = config
    model.set_experts_implementation("eager")  # others call kernels of experts
    for name, module in model.named_modules():
        for key in [key for key, tensor in module.named_parameters(recurse=False) if tensor.is_meta]:
            if f"{name}.{key}" in values:
                codes, scales = quantize(values[f"{name}.{key}"])
                setattr(module, key, torch.nn.Parameter(codes, requires_grad=False))
                setattr(module, f"{key}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit weights and their block scales."""
    blocks = _split(values.float(), (-(-values.shape[-2] // _BLOCK[0]), -(-values.shape[-1] // _BLOCK[1])))
    scales = blocks.abs().amax((-3, -1)) / _LARGEST
    return (blocks / scales[..., :, None, :, None]).view(values.shape).to(torch.float8_e4m3fn), scales


def _split(values: torch.Tensor, counts: Any) -> torch.Tensor:
    rows, columns = counts
    return values.view(*values.shape[:-2], rows, values.shape[-2] // rows, columns, values.shape[-1] // columns)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what 8-bit weights with block scales stand for, in float32."""
    return (_split(codes.float(), scales.shape[-2:]) * scales[..., :, None, :, None]).view(codes.shape)


def list_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors, those with block scales as what they stand for."""
    return {
        key: dequantize(tensor, tensors[f"{key}_scale_inv"]) if f"{key}_scale_inv" in tensors else tensor
        for key, tensor in tensors.items()
        if not key.endswith("_scale_inv")
    }


def compute_linear(inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stand in for transformers' kernel, which takes a GPU: a layer of 8-bit weights with block scales."""
    return torch.nn.functional.linear(inputs, dequantize(codes, scales).to(inputs.dtype))


def quiet_peft(function: Any) -> Any:
    """Make PEFT, which asks transformers by an older name, do so without a warning."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
            return function(*args, **options)

    return run


@quiet_peft
def add_adapter(model: Any, *, in_float32: bool = False, **options: Any) -> Any:
    """Return a model of PEFT with a LoRA adapter: all else is frozen."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=in_float32)


@quiet_peft
def load_adapter(model: Any, folder: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model with the adapter of a folder, by PEFT, and which keys were missing or unexpected."""
    import peft

    adapted = peft.PeftModel.from_pretrained(model, folder)
    found = adapted.load_adapter(folder, "default")
    return adapted, {"missing": found.missing_keys, "unexpected": found.unexpected_keys}


def fill_adapter(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill the adapter of a model of PEFT with the weights of a folder."""
    import peft

    found = peft.set_peft_model_state_dict(model, weights)
    assert not found.unexpected_keys
