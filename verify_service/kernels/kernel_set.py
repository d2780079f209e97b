"""The kernels of a step, and what each promises: Triton's launchers on a GPU, their plain twins anywhere."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import RecurrentShape
from verify_service.kernels.arguments import (
    AttentionSettings,
    Convolution,
    DrawSettings,
    GatedNorm,
    Gates,
    HeadNorms,
    KvPages,
    LayerCommitInputs,
    Outcome,
    TreeMetadata,
)


class KernelSet(Protocol):
    """The kernels of passes over B trees with N nodes each, M = B * N rows; docs/glossary.md has the letters.

    A set keeps what its kernels need of scratch memory, as captured graphs hold on to it. Triton's launchers raise
    UnsupportedModelError for sizes and dtypes beyond their limits; the plain twins have none. Shapes of arguments stand
    here and in arguments.py, and are not repeated by either.
    """

    is_capturable: bool  # a graph can hold the kernels: nothing in them comes back to the host

    def tree_metadata(self, tree: TreeMetadata) -> None:
        """Derives positions, ancestors and depths from `tree.parents`, num_nodes and base_lengths.

        Nodes from num_nodes on are spare: they see only themselves, at the root's position, whatever their parents are.
        """

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor, normed: Tensor) -> None:
        """A residual sum, rounded to the format of `x`, and its RMS norm, which is computed in float32.

        x, delta [M, H], whose rows may be strided; weight [H] float32, the whole factor; written: total [M, H] x +
        delta, normed [M, H] its rmsnorm times the weight. `x` may not come from the kernel just ahead.
        """

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """silu(gate) up; both steps are rounded to the format of `x`.

        x [M, 2 F] gate | up, whose rows may be strided; out [M, F], written.
        """

    def rotate_heads(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        norms: HeadNorms,
        step: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Heads of queries and keys out of one projection, normed, rounded to its format, rotated; values beside them.

        x [M, q | k | v], whose rows may be strided and whose heads of q are `step` apart; rotation: cosines and sines,
        [M, R] each; written: q [M, HQ, D], keys [M, HKV, D], values [M, HKV, D].
        """

    def tree_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: KvPages,
        tree: TreeMetadata,
        settings: AttentionSettings,
        out: Tensor,
    ) -> None:
        """Softmax attention of every node over the committed positions and its ancestors, itself included.

        q [B, N, HQ, D] and k [B, N, HKV, D], rotated; v [B, N, HKV, D]; out [B, N, HQ, D], written. Sums are float32.
        Slots of positions that are not committed are not read.
        """

    def conv_gate(
        self,
        x: Tensor,
        tree: TreeMetadata,
        windows: Tensor,
        convolution: Convolution,
        gates: Gates | None,
        commit_inputs: LayerCommitInputs,
        *,
        key_dim: int = 0,
    ) -> None:
        """The causal convolution along each node's path, above the root over the committed window, and the gates.

        x [B, N, C], whose rows may be strided; windows [T, kernel_size - 1, C] of one layer, newest last. Writes the
        whole of `commit_inputs`: `norms`, where there are any, of the first 2 HK heads of K = `key_dim` channels of the
        convolution, g and beta where there are `gates`. Rounded where transformers rounds: the convolution once, beta
        in the format of the gates.
        """

    def gdn_verify(
        self, commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, norm: GatedNorm | None, out: Tensor
    ) -> None:
        """Gated DeltaNet's outputs at all nodes, through the norm where there is one.

        states [T, HV, V, K] float32 of one layer, only read; out [B, N, HV, V], written.
        """

    def mamba2_verify(
        self, commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, skip: Tensor, out: Tensor
    ) -> None:
        """Mamba2's outputs at all nodes, D x included.

        states [T, HV, V, K] float32 of one layer, only read; skip [HV] float32, D; out [B, N, HV, V], written.
        """

    def sample(
        self, logits: Tensor, tree: TreeMetadata, settings: DrawSettings, drawn: Tensor, *, has_filters: bool
    ) -> None:
        """The target's draw at every node, for the position after it.

        logits [B, N, vocab_size]; drawn [B, N] int32, written: 0 at spare nodes, -1 where the logits are no
        distribution. `has_filters` may be false only where no row has a top-k, top-p or min-p.
        """

    def accept_walk(
        self, input_ids: Tensor, tree: TreeMetadata, drawn: Tensor, settings: DrawSettings, outcome: Outcome
    ) -> None:
        """The walk along the draws, as verify_service.core.accept has it; writes `outcome`.

        input_ids [B, N] int64; drawn [B, N] int32, -1 for no draw. A path ends after D_path nodes even where the walk
        would go on, and a walk that ends the answer or comes to a node without a draw has path_length 0. Behind its
        last node a path is padded with 0, tokens with -1; a row without nodes has nothing else.
        """

    def recurrent_commit(
        self, shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata
    ) -> None:
        """Moves states and windows of all recurrent layers on along the paths, in place, token after token.

        A path of n tokens leaves what n paths of one leave, bit for bit.
        """

    def kv_commit(
        self, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata, page_size: int
    ) -> None:
        """Copies the keys and values of the paths' nodes, of all attention layers, to the slots of their positions."""
