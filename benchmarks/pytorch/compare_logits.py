#!/usr/bin/env python3
"""Compares the logits of a shardlab checkpoint with those of transformers on the exported weights.

    shardlab weights export CHECKPOINT --model MODEL --out FOLDER
    benchmarks/pytorch/compare_logits.py CHECKPOINT FOLDER

CHECKPOINT is the folder of checkpoints or a manifest. The forward pass here is written from shardlab's own names and layouts
(docs/canonical-order.md), in fp64; transformers runs the exported files in fp32. Exit codes: 0 equal within rounding, 1 not, 77 skipped,
because PyTorch or transformers is not installed.
"""
import argparse
import math
import pathlib
import sys


def read_checkpoint(path, torch):
    """The parameters of the newest manifest, by name, as fp64 tensors."""
    manifest = pathlib.Path(path)
    if manifest.is_dir():
        manifest = max(manifest.glob("step-*.manifest"))
    entries, data = {}, None
    for line in manifest.read_text().splitlines():
        words = line.split()
        if words[0] == "data":
            data = manifest.parent / words[1]
        if words[0] == "tensor":
            name, part, shape, offset, size = words[1], words[2], words[3], int(words[4]), int(words[5])
            if part == "master" or (part == "value" and name not in entries):
                entries[name] = ([int(n) for n in shape.split("x")], offset, size)
    content = data.read_bytes()
    return {
        name: torch.frombuffer(bytearray(content[offset : offset + size]), dtype=torch.float32).reshape(shape).double()
        for name, (shape, offset, size) in entries.items()
    }


def norm(x, gamma, beta, epsilon):
    """LayerNorm where there is a beta, RMSNorm where there is none."""
    if beta is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gamma
    return x if beta is None else x + beta


def rotate(x, theta, torch):
    """x[tokens, heads, d]: the pairs are (i, i + d/2)."""
    tokens, _, d = x.shape
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * theta ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits_of(w, config, ids, torch):
    """ids[tokens] -> logits[tokens, vocab], from shardlab's parameters `w`."""
    llama = config.model_type == "llama"
    heads = config.num_attention_heads
    groups = config.num_key_value_heads if llama else heads
    epsilon = config.rms_norm_eps if llama else config.layer_norm_epsilon
    x = w["embed.tokens"][ids]
    if not llama:
        x = x + w["embed.positions"][: len(ids)]
    hidden_dim = w["layers.0.attn.wqkv"].shape[0] // (heads + 2 * groups)
    mask = torch.full((len(ids), len(ids)), -math.inf, dtype=torch.float64).triu(1)
    for layer in range(config.num_hidden_layers):
        p = lambda name: w.get(f"layers.{layer}.{name}")
        n = norm(x, p("attn.norm.gamma"), p("attn.norm.beta"), epsilon)
        qkv = n @ p("attn.wqkv").T + (0 if llama else p("attn.bqkv"))
        # Rows by group: its query heads, one key, one value.
        qkv = qkv.reshape(len(ids), groups, heads // groups + 2, hidden_dim)
        q = qkv[:, :, :-2].reshape(len(ids), heads, hidden_dim)
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        if llama:
            theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
            q, k = rotate(q, theta, torch), rotate(k, theta, torch)
        k, v = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)
        score = torch.einsum("thd,uhd->htu", q, k) / math.sqrt(hidden_dim) + mask
        o = torch.einsum("htu,uhd->thd", score.softmax(-1), v).reshape(len(ids), -1)
        x = x + o @ p("attn.wo").T + (0 if llama else p("attn.bo"))
        n = norm(x, p("mlp.norm.gamma"), p("mlp.norm.beta"), epsilon)
        u = n @ p("mlp.wup").T + (0 if llama else p("mlp.bup"))
        if llama:  # gate and up in turn
            a = u[:, 0::2] * torch.sigmoid(u[:, 0::2]) * u[:, 1::2]
        else:
            a = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + a @ p("mlp.wdown").T + (0 if llama else p("mlp.bdown"))
    x = norm(x, w["final.norm.gamma"], w.get("final.norm.beta"), epsilon)
    return x @ w.get("head.weight", w["embed.tokens"]).T


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", help="what `shardlab weights export` wrote")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as missing:
        print(f"SKIPPED: {missing.name} is not installed; `pip install torch transformers` to compare logits")
        return 77
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, torch_dtype=torch.float32).eval()
    tokens = min(arguments.tokens, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    ours = logits_of(read_checkpoint(arguments.checkpoint, torch), model.config, ids, torch)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0].double()
    worst = ((ours - theirs).abs().max() / ours.abs().max()).item()
    print(f"{tokens} tokens, {model.config.vocab_size} logits each: largest difference {worst:.2e} of the largest logit")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
