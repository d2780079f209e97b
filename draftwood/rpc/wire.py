"""Between wire messages and the values they carry; only servicers and clients call this."""

from __future__ import annotations

import numpy as np

from draftwood.errors import InvalidRequestError, MalformedTreeError
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions
from draftwood.v1 import sampling_pb2, tree_pb2

# Raise it with every change after which an old drafter and a new verify service, or the other way round, would
# misunderstand each other's draft.proto messages without an error. New fields that may be absent do not count.
PROTOCOL_VERSION = 1

ALGORITHM_TO_WIRE = {
    "none": tree_pb2.ALGORITHM_NONE,
    "dflash": tree_pb2.ALGORITHM_DFLASH,
    "ddtree": tree_pb2.ALGORITHM_DDTREE,
}
ALGORITHM_FROM_WIRE = {value: name for name, value in ALGORITHM_TO_WIRE.items()}

_INT32, _INT16, _FLOAT32 = np.dtype("<i4"), np.dtype("<i2"), np.dtype("<f4")


def tree_to_wire(tree: DraftTree) -> tree_pb2.DraftTree:
    """Packs a tree without its root."""
    return tree_pb2.DraftTree(
        token_ids=np.array(tree.token_ids[1:], _INT32).tobytes(),
        parents=np.array(tree.parents[1:], _INT16).tobytes(),
        log_probs=np.array(tree.log_probs[1:], _FLOAT32).tobytes(),
    )


def tree_from_wire(
    message: tree_pb2.DraftTree, root: int, *, vocab_size: int, tree_budget: int, max_depth: int
) -> DraftTree:
    """Unpacks and checks an untrusted tree: lengths, parent order, token range, budget, depth, finite log-probs."""
    lengths = len(message.token_ids), len(message.parents), len(message.log_probs)
    n = lengths[0] // 4
    if lengths != (4 * n, 2 * n, 4 * n):
        raise MalformedTreeError(
            f"token_ids, parents and log_probs hold {lengths} bytes, not 4, 2 and 4 per node", field="tree"
        )
    if n > tree_budget:
        raise MalformedTreeError(f"the tree has {n} nodes, more than the {tree_budget} asked for", field="tree")
    token_ids = np.frombuffer(message.token_ids, _INT32)
    log_probs = np.frombuffer(message.log_probs, _FLOAT32)
    if n and not (0 <= int(token_ids.min()) and int(token_ids.max()) < vocab_size):
        raise MalformedTreeError(f"a token id is outside [0, {vocab_size})", field="tree.token_ids")
    if not np.isfinite(log_probs).all():
        raise MalformedTreeError("a log-probability is not finite", field="tree.log_probs")
    parents = np.frombuffer(message.parents, _INT16).tolist()
    tree = DraftTree.from_nodes(root, token_ids.tolist(), parents, log_probs.tolist())
    if tree.max_depth > max_depth:
        raise MalformedTreeError(f"the tree is {tree.max_depth} deep, more than {max_depth}", field="tree.parents")
    return tree


def tree_options_to_wire(options: TreeOptions) -> tree_pb2.TreeOptions:
    """What a drafter is asked for."""
    return tree_pb2.TreeOptions(
        algorithm=ALGORITHM_TO_WIRE[options.algorithm],
        tree_budget=options.tree_budget,
        width_cap=options.width_cap,
        spine=options.spine,
        num_candidates=options.num_candidates,
    )


def sampling_to_wire(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Neutral values are left out, the seed is always there."""
    message = sampling_pb2.SamplingParams(temperature=params.temperature, seed=params.seed)
    if params.top_p < 1.0:
        message.top_p = params.top_p
    if params.top_k:
        message.top_k = params.top_k
    if params.min_p:
        message.min_p = params.min_p
    if params.presence_penalty:
        message.presence_penalty = params.presence_penalty
    if params.frequency_penalty:
        message.frequency_penalty = params.frequency_penalty
    if params.repetition_penalty != 1.0:
        message.repetition_penalty = params.repetition_penalty
    for token, bias in params.logit_bias.items():
        message.logit_bias.add(token_id=token, bias=bias)
    return message


def sampling_from_wire(message: sampling_pb2.SamplingParams, *, seed: int, vocab_size: int) -> SamplingParams:
    """Absent fields become neutral, `seed` stands in for an absent seed. Raises InvalidRequestError."""
    has = message.HasField
    if has("top_k") and message.top_k == 0:
        raise InvalidRequestError("top_k is 0, not at least 1", field="top_k")
    for entry in message.logit_bias:
        if entry.token_id >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias names token {entry.token_id}, not in [0, {vocab_size})", field="logit_bias"
            )
    return SamplingParams(
        temperature=message.temperature if has("temperature") else 0.0,
        top_p=message.top_p if has("top_p") else 1.0,
        top_k=message.top_k if has("top_k") else 0,
        min_p=message.min_p if has("min_p") else 0.0,
        seed=message.seed if has("seed") else seed,
        presence_penalty=message.presence_penalty if has("presence_penalty") else 0.0,
        frequency_penalty=message.frequency_penalty if has("frequency_penalty") else 0.0,
        repetition_penalty=message.repetition_penalty if has("repetition_penalty") else 1.0,
        logit_bias={entry.token_id: entry.bias for entry in message.logit_bias},
    )


def microseconds(seconds: float) -> int:
    """A duration as it travels, never below 0."""
    return min(max(round(seconds * 1e6), 0), 2**63)
