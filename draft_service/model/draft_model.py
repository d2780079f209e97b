"""The DFlash draft model: one non-autoregressive pass over blocks [root, mask, ..., mask].

Letters: S sequences, N block size, H hidden size, G key heads, Q query heads per key head, D head size, L layers, T
keys of a row (padding, context, block, in this order), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_service.model.config import DrafterConfig
from draft_service.model.tensors import TargetTensors
from draftwood.device.layers import GatedMLP, PackedLinear, RMSNorm, rotate


class DraftLayer(nn.Module):
    """A Qwen3 decoder layer whose attention sees a context that is cached and a block that is not."""

    def __init__(self, tensors: Mapping[str, Tensor], index: int, config: DrafterConfig) -> None:
        super().__init__()

        def weight(name: str) -> Tensor:
            return tensors[f"layers.{index}.{name}.weight"]

        eps = config.rms_norm_eps
        self.groups, self.queries = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.dim = config.head_dim
        self.input_norm, self.post_norm = (RMSNorm(weight(f"{n}_layernorm"), eps) for n in ("input", "post_attention"))
        self.q_norm, self.k_norm = (RMSNorm(weight(f"self_attn.{n}_norm"), eps) for n in "qk")
        self.qkv = PackedLinear(*(weight(f"self_attn.{n}_proj") for n in "qkv"))
        self.output = PackedLinear(weight("self_attn.o_proj"))
        self.mlp = GatedMLP(*(weight(f"mlp.{n}_proj") for n in ("gate", "up", "down")))

    def forward(
        self,
        x: Tensor,  # [S, N, H]
        rotation: tuple[Tensor, Tensor],  # [S, N, 1, D] each
        keys: Tensor,  # [S, G, T, D]; the last N are written here
        values: Tensor,  # [S, G, T, D]; the same
        mask: Tensor | None,  # [S, 1, Q * N, T], true where visible
    ) -> Tensor:  # [S, N, H]
        s, n, _ = x.shape
        g, q, d = self.groups, self.queries, self.dim
        queries, k, v = self.qkv(self.input_norm(x)).view(s, n, g * (q + 2), d).split([g * q, g, g], 2)
        keys[:, :, -n:] = rotate(self.k_norm(k), *rotation).transpose(1, 2)
        values[:, :, -n:] = v.transpose(1, 2)
        # Heads that share keys are stacked as rows of one: a larger product, and no repeated keys.
        queries = rotate(self.q_norm(queries), *rotation).view(s, n, g, q, d).permute(0, 2, 3, 1, 4)
        attend = F.scaled_dot_product_attention if x.device.type == "cpu" else attention_by_products
        out = attend(queries.reshape(s, g, q * n, d), keys, values, mask)
        x = x + self.output(out.view(s, g, q, n, d).permute(0, 3, 1, 2, 4).reshape(s, n, -1))
        return x + self.mlp(self.post_norm(x))


def attention_by_products(
    queries: Tensor,  # [S, G, R, D]
    keys: Tensor,  # [S, G, T, D]
    values: Tensor,  # [S, G, T, D]
    mask: Tensor | None,  # [S, 1, R, T], true where visible
) -> Tensor:  # [S, G, R, D]
    """Softmax attention as two products: a few rows and a long context leave a GPU's fused kernels on few of its
    multiprocessors."""
    scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(2, 3)).float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(values.dtype), values)


class DraftModel(nn.Module):
    """All of a DFlash model that runs at the draft service."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        target: TargetTensors,
        config: DrafterConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        layers = [DraftLayer(tensors, i, config) for i in range(len(config.layers))]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(tensors["norm.weight"], config.rms_norm_eps)
        projections = (tensors[f"layers.{i}.self_attn.{n}_proj.weight"] for n in "kv" for i in range(len(layers)))
        self.context_kv = PackedLinear(*projections)
        self.context_k_norms = torch.stack([layer.k_norm.weight for layer in layers])[:, None]  # [L, 1, D]
        self.embedding = target.embedding.to(device)  # rows are converted when they are looked up: half the memory
        self.head = PackedLinear(target.head.to(device, dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...]."""
        rows = self.embedding[token_ids].to(self.dtype)
        return rows if self.config.input_embedding_scale == 1.0 else rows * self.config.input_embedding_scale

    def forward(
        self,
        x: Tensor,  # [S, N, H] embedded blocks
        cos: Tensor,  # [S, N, 1, D]
        sin: Tensor,  # [S, N, 1, D]
        keys: Tensor,  # [L, S, G, T, D]; the last N rows are scratch, for the block's own
        values: Tensor,  # [L, S, G, T, D]; the same
        masks: Sequence[Tensor | None],  # L times [S, 1, Q * N, T]; None where everything is visible
    ) -> Tensor:  # [S, N, H]
        """Final hidden states. Everything but `x` and the scratch rows is only read."""
        for i, layer in enumerate(self.layers):
            x = layer(x, (cos, sin), keys[i], values[i], masks[i])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [..., V] of final hidden states [..., H]."""
        logits = self.head(hidden).float()
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def context(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, L, G, D] of feature rows [n, H], cos and sin [n, D]: one product for all layers."""
        layers, groups, dim = len(self.config.layers), self.config.num_kv_heads, self.config.head_dim
        keys, values = self.context_kv(rows).view(-1, 2, layers, groups, dim).unbind(1)
        keys = F.rms_norm(keys.float(), (dim,), None, self.config.rms_norm_eps) * self.context_k_norms
        return rotate(keys.to(self.dtype), cos[:, None, None], sin[:, None, None]), values
