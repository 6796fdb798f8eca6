#!/usr/bin/env python3
"""Times a training step of a Llama in plain PyTorch, for comparison with `shardlab run` on the same device.

The model, batch, optimizer and count of flops are shardlab's: RMSNorm, rotary positions, SwiGLU, grouped-query attention through
scaled_dot_product_attention, mean cross-entropy, AdamW with fused updates, no dropout, no recompute. Tokens are random: a step's time
does not depend on them. MFU is 6 * (matmul parameters, the head's included) + 6 * layers * heads * head_dim * seq_len flops a token
(plan/model.h, `model_flops_per_token`) against --peak-tflops.

    python3 benchmarks/pytorch/train_step.py --config sweeps/models/llama-3.2-1b.json --vocab 256 --peak-tflops 67

prints one JSON object: seconds of a step (median, p10, p90), tokens/s, MFU, peak bytes that PyTorch allocated and reserved, versions
and device. Exit code 6 where PyTorch or the device is not there.
"""

import argparse
import json
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    print(f"train_step.py: {error}: install PyTorch 2 to compare with it", file=sys.stderr)
    sys.exit(6)


class RmsNorm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype) * self.weight.to(x.dtype)


def rotary_table(tokens, head_dim, theta, device):
    """cos and sin, [tokens, head_dim / 2]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.outer(torch.arange(tokens, device=device).float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x, table):
    """x: [batch, heads, tokens, head_dim]; halves of head_dim are the pairs."""
    cos, sin = (t.to(x.dtype) for t in table)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], d
        self.attention_norm = RmsNorm(h, c["rms_norm_eps"])
        self.qkv = nn.Linear(h, (self.heads + 2 * self.kv_heads) * d, bias=False)
        self.out = nn.Linear(self.heads * d, h, bias=False)
        self.mlp_norm = RmsNorm(h, c["rms_norm_eps"])
        self.up = nn.Linear(h, 2 * c["intermediate_size"], bias=False)
        self.down = nn.Linear(c["intermediate_size"], h, bias=False)

    def forward(self, x, table):
        batch, tokens, _ = x.shape
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q, k, v = (part.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
                   for part in self.qkv(self.attention_norm(x)).split(sizes, dim=-1))
        q, k = rotate(q, table), rotate(k, table)
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, tokens, -1))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RmsNorm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=c.get("initializer_range", 0.02))
        if c.get("tie_word_embeddings", False):
            self.head.weight = self.embed.weight

    def forward(self, ids, targets):
        c = self.config
        table = rotary_table(ids.shape[1], c["head_dim"], c.get("rope_theta", 10000.0), ids.device)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_config(path, vocab):
    with open(path, encoding="utf-8") as file:
        c = json.load(file)
    if c.get("model_type") != "llama":
        raise SystemExit(f"train_step.py: {path} is of model_type {c.get('model_type')}; this script has the Llama family only")
    c.setdefault("num_key_value_heads", c["num_attention_heads"])
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"])
    c.setdefault("rms_norm_eps", 1e-5)
    if vocab:
        c["vocab_size"] = vocab
    return c


def flops_per_token(c, seq_len):
    h, d = c["hidden_size"], c["head_dim"]
    layer = h * (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * d + c["num_attention_heads"] * d * h + 3 * h * c["intermediate_size"]
    matmul = c["num_hidden_layers"] * layer + c["vocab_size"] * h
    return 6 * matmul + 6 * c["num_hidden_layers"] * c["num_attention_heads"] * d * seq_len


def quantile(values, q):
    values = sorted(values)
    at = q * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="a Hugging Face config.json of the Llama family")
    parser.add_argument("--vocab", type=int, default=0, help="rows of the embedding instead of the file's")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32",
                        help="bf16: autocast, parameters and moments stay fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float, default=0, help="dense peak of the precision, for MFU")
    a = parser.parse_args()
    for name in ("seq_len", "micro_batch", "steps"):
        if getattr(a, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return a


def main():
    a = parse_arguments()
    if a.device == "cuda" and not torch.cuda.is_available():
        print("train_step.py: PyTorch sees no CUDA device; --device cpu runs on the host", file=sys.stderr)
        return 6
    on_gpu = a.device.startswith("cuda")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = a.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = a.precision == "tf32"
    c = read_config(a.config, a.vocab)
    model = Llama(c).to(a.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **({"fused": True} if on_gpu else {}))
    run = torch.compile(model) if a.compile else model
    ids = torch.randint(c["vocab_size"], (a.micro_batch, a.seq_len + 1), device=a.device)

    def synchronise():
        if on_gpu:
            torch.cuda.synchronize()

    def step():
        with torch.autocast(a.device.split(":")[0], dtype=torch.bfloat16, enabled=a.precision == "bf16"):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(a.warmup):
        loss = step()
    synchronise()
    seconds = []
    for _ in range(a.steps):
        begin = time.perf_counter()
        loss = step()
        synchronise()
        seconds.append(time.perf_counter() - begin)
    tokens = a.micro_batch * a.seq_len
    median = statistics.median(seconds)
    flops = flops_per_token(c, a.seq_len) * tokens
    print(json.dumps({
        "program": "pytorch", "version": torch.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "model": a.config, "vocab": c["vocab_size"], "parameters": sum(p.numel() for p in model.parameters()),
        "seq_len": a.seq_len, "micro_batch": a.micro_batch, "precision": a.precision, "compile": a.compile, "steps": a.steps,
        "step_s": median, "step_p10_s": quantile(seconds, 0.1), "step_p90_s": quantile(seconds, 0.9),
        "tokens_per_s": tokens / median, "model_flops_per_step": flops, "model_flops_per_s": flops / median,
        "mfu": flops / median / (a.peak_tflops * 1e12) if a.peak_tflops > 0 else None,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "loss": float(loss.detach()),
    }, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
