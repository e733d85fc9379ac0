"""transformers' model of a shape in this process: its prompt and its generate. Returns numbers."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_time import wall_ms
from chatkv.models.spec import ModelSpec


def make_peer(spec: ModelSpec) -> Any:
    """transformers' model of the same shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=2 * spec.context_limit,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def peer_prompts(peer: Any, length: int) -> list[dict[str, Any]]:
    """Milliseconds of one forward pass over a prompt, by attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids = torch.randint(0, peer.config.vocab_size, (1, length), device="cuda")
    found: list[dict[str, Any]] = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def run(backend: Any = backend) -> None:
            with torch.inference_mode(), sdpa_kernel(backend):
                peer(ids, use_cache=True, logits_to_keep=1)

        try:
            ms = wall_ms(run, 5)
        except RuntimeError as error:
            print(f"  transformers, {backend.name}: {str(error).splitlines()[0]}")
            continue
        print(f"  transformers, {backend.name}, prompt of {length}: {ms:.1f} ms")
        found.append({"attention": backend.name, "tokens": length, "ms": ms})
    return found


def peer_generate(peer: Any, context: int) -> dict[str, Any]:
    """Milliseconds a token of generate with a static cache, compiled."""
    ids = torch.randint(0, peer.config.vocab_size, (1, context), device="cuda")

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begun)

    begun = time.perf_counter()
    for _ in range(2):
        run(72)
        run(8)
    warm = time.perf_counter() - begun
    ms = (min(run(72) for _ in range(2)) - min(run(8) for _ in range(2))) / 64
    print(f"  transformers generate, static cache, compiled: {ms:.3f} ms (warm-up {warm:.0f} s)")
    return {"context": context, "ms_a_token": ms}
