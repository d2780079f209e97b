"""The reference process: transformers' generate and teacher-forced logits, asked in JSON lines on standard input.

{"op": "generate", "prompt": [ids], "max_new": n, "temperature": t}  ->  {"ids", "decode_s", "prefill_s"}
{"op": "judge", "prompt": [ids], "answer": [ids]}  ->  {"positions": [[best id, best, second, chosen logit], ...]}
{"op": "memory"}  ->  {"peak_memory_bytes"}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from draftwood.device.placement import multiplies_bfloat16, use_threads
from draftwood.memory import peak_memory_bytes


class _Clock(BaseStreamer):
    """Notes when each token came. transformers puts the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Worker:
    """A loaded model."""

    def __init__(self, target: str, dtype: str, device: str) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" or multiplies_bfloat16() else "float32"
        config = AutoConfig.from_pretrained(target)
        model: Any = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()
        self.device = device
        eos = self.model.generation_config.eos_token_id
        self.pad = eos[0] if isinstance(eos, list) else eos

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decodes one prompt."""
        temperature = float(request.get("temperature", 0.0))
        drawn = {"temperature": temperature, "top_p": request.get("top_p", 1.0), "top_k": 0} if temperature > 0 else {}
        ids, clock = torch.tensor([request["prompt"]], device=self.device), _Clock()
        started = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_new"], do_sample=temperature > 0,
            streamer=clock, pad_token_id=self.pad, **drawn,
        )  # fmt: skip
        times = clock.times[1:]
        return {
            "ids": output[0, ids.shape[1] :].tolist(),
            "decode_s": times[-1] - times[0],
            "prefill_s": times[0] - started,
        }

    def judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Logits of one pass over prompt and answer."""
        prompt, answer = request["prompt"], request["answer"]
        ids = torch.tensor([prompt + answer[:-1]], device=self.device)
        logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()  # [num_answer, vocab_size]
        values, best = logits.topk(2)
        chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None])
        entries = zip(best[:, 0].tolist(), values.tolist(), chosen[:, 0].tolist(), strict=True)
        return {"positions": [[best_id, first, second, token] for best_id, (first, second), token in entries]}


def main() -> None:
    """Answers requests until standard input ends."""
    parser = argparse.ArgumentParser()
    for name in ("--target", "--dtype", "--device"):
        parser.add_argument(name, required=True)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    use_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    replies = sys.stdout
    with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):  # what libraries print is no reply
        worker = Worker(args.target, args.dtype, args.device)
        for line in sys.stdin:
            replies.write(json.dumps(_reply(worker, json.loads(line))) + "\n")
            replies.flush()


def _reply(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["op"] == "memory":
            return {"peak_memory_bytes": peak_memory_bytes()}
        return worker.generate(request) if request["op"] == "generate" else worker.judge(request)
    except Exception as error:  # goes to whoever asked
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
