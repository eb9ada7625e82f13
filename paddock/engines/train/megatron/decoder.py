"""Builds a Hugging Face decoder of Megatron's layers, with the config that they read."""

from __future__ import annotations

import importlib
import logging
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel

from paddock.core.registry import suggest
from paddock.engines.train.megatron.latent import LatentAttention
from paddock.engines.train.megatron.layers import How, MegatronNorm, PackedAttention, traits
from paddock.engines.train.megatron.layout import Layout, ParallelRanks
from paddock.engines.train.settings import Settings
from paddock.errors import UserError
from paddock.models.packing import Inputs
from paddock.models.token_stats import Head
from paddock.models.ulysses import require_divisible_heads

log = logging.getLogger(__name__)

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 asks whether it is there, and without Transformer Engine the name is not

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")
"""Model types whose every part is one of Megatron's: norms before attention and MLP or experts, gates, SiLU, rotary."""

HONOURED = {
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "moe_router_dtype",
}  # fmt: skip
FASTER_ELSEWHERE = {
    "apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion",
    "deallocate_pipeline_outputs", "gradient_accumulation_fusion", "masked_softmax_fusion", "moe_enable_deepep",
    "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap", "moe_token_dispatcher_type",
    "persist_layer_norm",
}  # fmt: skip
"""Kernels of Transformer Engine, Apex or DeepEP. They change the time of a step and not its result: a warning."""
ZERO = {"moe_aux_loss_coeff", "moe_z_loss_coeff"}
"""Megatron averages these losses over micro-batches, so gradients would depend on how a batch is split."""


class Decoder(nn.Module):
    """Holds this rank's part of a model: the layers of one stage, and one share of each matrix."""

    def __init__(
        self,
        theirs: PreTrainedModel,
        layout: Layout,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
        critic: bool,
    ):
        super().__init__()
        self.ranks = ParallelRanks.here()
        self.config = transformer_config(theirs, layout, settings, dtype, device)
        text = theirs.config.get_text_config()
        self.vocabulary, tensor = text.vocab_size, layout.tensor
        self.gpt = GPTModel(
            self.config,
            layer_spec(self.config, theirs),
            vocab_size=-(-self.vocabulary // tensor) * tensor,
            max_sequence_length=text.max_position_embeddings,
            pre_process=self.ranks.first,
            post_process=self.ranks.last,
            share_embeddings_and_output_weights=bool(text.tie_word_embeddings) and self.ranks.stages == 1,
            position_embedding_type="none",
        )
        self.rotary = theirs.base_model.rotary_emb
        self.value_head: nn.Linear | None = None
        if critic and self.ranks.last:
            del self.gpt.output_layer
            self.value_head = nn.Linear(text.hidden_size, 1, dtype=torch.float32)
        self.to(device)

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        """Returns the shape ``[T, 1, hidden]`` of the states between stages."""
        tokens = inputs.tokens.shape[1] // (self.ranks.tensor.size() if self.config.sequence_parallel else 1)
        return tokens, 1, self.config.hidden_size

    def states(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        """Returns the states ``[T, 1, hidden]`` after this stage's layers."""
        assert inputs.packed is not None
        if before is None:
            before = self.gpt.embedding(input_ids=inputs.tokens, position_ids=inputs.positions)
            if torch.is_grad_enabled() and not before.requires_grad:
                before.requires_grad_()  # frozen, and yet recomputed layers ask for the gradient of what they read
        else:
            self.gpt.set_input_tensor(before)
        cos, sin = self.rotary(before, inputs.positions)
        return self.gpt.decoder(before, attention_mask=None, packed_seq_params=How(inputs.packed, cos, sin))

    def wanted(self, states: Tensor, inputs: Inputs) -> Tensor:
        """Returns the states ``[N, hidden]`` that the inputs ask for, on every rank that has a part of the head."""
        split_head = self.value_head is None
        if self.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, split_head, group=self.ranks.tensor)
        elif split_head:
            states = copy_to_tensor_model_parallel_region(states, group=self.ranks.tensor)
        return states.squeeze(1).index_select(0, inputs.states)

    def values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        return self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)

    def head(self) -> Head:
        """Returns this rank's part of the vocabulary, without the rows that only make parts equal."""
        weight = self.gpt.output_layer.weight
        if weight is None:  # tied, and the embedding is on this stage too
            weight = self.gpt.embedding.word_embeddings.weight
        first = self.ranks.tensor.rank() * len(weight)
        ranks = self.ranks.tensor if self.ranks.tensor.size() > 1 else None
        own = max(0, min(len(weight), self.vocabulary - first))
        return Head(weight if own == len(weight) else weight[:own], first=first, ranks=ranks)


def layer_spec(config: TransformerConfig, theirs: PreTrainedModel) -> Any:
    """Returns Megatron's own layers, with attention and norms that need no Transformer Engine."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    modelling = importlib.import_module(type(theirs).__module__)
    attention = [traits(layer.self_attn) for layer in theirs.base_model.layers]
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = MegatronNorm
        if hasattr(attention[0], "kv_lora_rank"):
            parts.self_attention = ModuleSpec(LatentAttention, {"layers": attention, "modelling": modelling})
            continue
        inner = parts.self_attention.submodules
        inner.core_attention = partial(PackedAttention, attention, modelling.apply_rotary_pos_emb)
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(inner, name) is not IdentityOp:
                setattr(inner, name, MegatronNorm)
    block.layer_norm = MegatronNorm
    return block


def transformer_config(
    theirs: PreTrainedModel, layout: Layout, settings: Settings, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    text = theirs.config.get_text_config()
    require_known(theirs.config)
    require_divisible_heads(text, layout.tensor, f"{layout.key}.tensor_model_parallel_size")
    require_divisible_heads(text, layout.context, f"{layout.key}.context_parallel_size", beside=layout.tensor)
    tensors = theirs.base_model.state_dict()
    options: dict[str, Any] = {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": getattr(theirs.base_model.layers[0].self_attn, "head_dim", None),
        "normalization": "RMSNorm",
        "layernorm_epsilon": text.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "qk_layernorm": "layers.0.self_attn.q_norm.weight" in tensors,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": settings.compute,
        "bf16": settings.compute == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    options |= expert_options(text, tensors, layout) | recompute(settings) | allowed(layout)
    try:
        return TransformerConfig(**options)
    except (ValueError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or ["Megatron refuses these values"])[0]
        fix = "see Megatron's TransformerConfig"
        raise UserError(reason, key=f"{layout.key}.override_transformer_config", fix=fix) from error


def recompute(settings: Settings) -> dict[str, Any]:
    if not settings.checkpointing:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def expert_options(text: PreTrainedConfig, tensors: dict[str, Tensor], layout: Layout) -> dict[str, Any]:
    down = "layers.{}.mlp.experts.down_proj"
    pattern = [int(down.format(layer) in tensors) for layer in range(text.num_hidden_layers)]
    if not any(pattern):
        if layout.expert > 1:
            key = f"{layout.key}.expert_model_parallel_size"
            raise UserError(f"{text.model_type} models have no experts", key=key, value=layout.expert, fix=f"{key}=1")
        return {}
    if layout.tensor > 1 and not layout.sequence:
        key = f"{layout.key}.sequence_parallel"
        raise UserError("experts beside tensor parallelism need it", key=key, value=False, fix=f"{key}=True")

    def named(name: str, default: Any = None) -> Any:
        found = getattr(text, name, None)
        return default if found is None else found

    experts, _, inner = tensors[down.format(pattern.index(1))].shape
    if experts % layout.expert:
        key = f"{layout.key}.expert_model_parallel_size"
        raise UserError(f"{experts} experts do not divide over them", key=key, value=layout.expert, fix="a divisor")
    options = {
        "num_moe_experts": experts,
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_pre_softmax": not named("norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": named("shared_expert_intermediate_size")
        or named("n_shared_experts", 0) * inner
        or None,
        "moe_shared_expert_gate": any(name.endswith("shared_expert_gate.weight") for name in tensors),
    }
    if any(name.endswith("e_score_correction_bias") for name in tensors):
        groups, best = named("n_group", 1), text.num_experts_per_tok // named("topk_group", 1)
        if not named("norm_topk_prob", True) or (groups > 1 and best != 2):
            raise not_mapped(f"{text.model_type} routers that weigh experts in this way")
        options |= {
            "moe_router_dtype": "fp32",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": named("routed_scaling_factor", 1.0),
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": named("topk_group") if groups > 1 else None,
        }
    return options


def allowed(layout: Layout) -> dict[str, Any]:
    """Returns the fields of Megatron's config that the user may set; refuses others by name, or warns of no effect."""
    place, known = f"{layout.key}.override_transformer_config", {field.name for field in fields(TransformerConfig)}
    honoured: dict[str, Any] = {}
    for name, value in layout.overrides.items():
        key = f"{place}.{name}"
        if name in HONOURED:
            honoured[name] = value
        elif name in FASTER_ELSEWHERE:
            if name != "attention_backend":
                log.warning("%s=%s has no effect: the layers are those that need no Transformer Engine", key, value)
        elif name in ZERO:
            if value:
                reason = "Megatron averages it over micro-batches, and how a batch is split must not change a gradient"
                raise UserError(reason, key=key, value=value, fix="leave it out")
        elif name in known:
            reason = "follows from the model, or is not honoured"
            raise UserError(
                reason, key=key, value=value, fix=f"of its neighbours these are: {', '.join(sorted(HONOURED))}"
            )
        else:
            raise UserError("Megatron has no such field", key=key, value=value, fix=suggest(name, sorted(HONOURED)))
    return {name: value for name, value in honoured.items() if value is not None}


def require_known(config: PreTrainedConfig) -> None:
    act = getattr(config, "hidden_act", "silu")
    if config.model_type not in FAMILIES or act != "silu":
        raise not_mapped(f"{config.model_type} models" if act == "silu" else f"layers with {act}")


def not_mapped(what: str) -> UserError:
    return UserError(
        f"{what} are not mapped to Megatron's layers",
        key="actor_rollout_ref.actor.strategy",
        value="megatron",
        fix=f"actor_rollout_ref.actor.strategy=fsdp; or a model of {', '.join(FAMILIES)}",
    )
