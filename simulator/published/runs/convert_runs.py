#!/usr/bin/env python3
"""Turns published tables of measured training runs into the columns of `shardlab validate`.

    convert_runs.py RAW_FOLDER [--out FOLDER]

RAW_FOLDER holds one CSV a source, as transcribed from the paper or repository (README.md beside this script names each). A row that
cannot be said in these columns, or was computed and not measured, is left out and counted on stderr with its reason. Values that the
source does not state are listed by column in `assumed`. Python's standard library only.
"""

import argparse
import collections
import csv
import pathlib
import re
import sys

MODEL = ["layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied_embeddings", "mlp", "norm"]
MOE = ["experts", "top_k", "moe_ffn", "shared_experts", "dense_layers", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"]
LAYOUT = ["dp", "tp", "pp", "vpp", "cp", "ep", "zero", "schedule", "sequence_parallel", "recompute", "precision", "micro_batch",
          "grad_accumulation", "seq_len", "global_batch_tokens"]
FABRIC = [f"{where}{kind}_busbw_gbps" for where in ("", "intra_") for kind in ("all_reduce", "all_gather", "reduce_scatter")] + ["busbw_bytes"]
MEASURED = ["measured_step_s", "measured_tokens_per_s", "measured_bytes", "measured_memory_kind", "measured_status"]
GIB = 2**30


class Set:
    """Rows of one output file. Columns that no row fills are not written."""

    def __init__(self, name):
        self.name = name
        self.rows = []
        self.left_out = collections.Counter()

    def add(self, **row):
        row.setdefault("dp", int(row["devices"]) // (int(row["tp"]) * int(row["pp"]) * int(row.get("cp", 1))))
        for key in ("vpp", "cp", "ep"):
            row.setdefault(key, 1)
        if "schedule" not in row:
            row["schedule"] = "none" if int(row["pp"]) == 1 else "interleaved" if int(row["vpp"]) > 1 else "1f1b"
        sequences = int(row["global_batch_tokens"]) // int(row["seq_len"])
        per_pass = int(row["micro_batch"]) * int(row["dp"])
        if sequences * int(row["seq_len"]) != int(row["global_batch_tokens"]) or sequences % per_pass:
            raise ValueError(f"{self.name}: {sequences} sequences do not divide into micro-batches of {per_pass}: {row}")
        row["grad_accumulation"] = sequences // per_pass
        product = int(row["dp"]) * int(row["tp"]) * int(row["pp"]) * int(row["cp"])
        if product != int(row["devices"]):
            raise ValueError(f"{self.name}: a layout of {product} ranks on {row['devices']} devices: {row}")
        self.rows.append(row)

    def write(self, folder):
        columns = ["source", "row", "profile", "model_name", *MODEL, "biases", "positions", *MOE, "machine", "devices", *LAYOUT, "expert_tp",
                   "stage_split", "overlap", "attention", "cp_kind", "async_tp", "compile", "fp8_scaling", "fp8_gather",
                   "expandable_segments", "hybrid_shard", "reduce_dtype", "master_dtype", "moment_dtype", "gradient_fusion", "tf32", "dropout", "head_chunks",
                   "offload", "offload_layers", "micro_batch_group", "expert_overlap", "cuda_graphs", "memory_rank", "vintage", *FABRIC, *MEASURED, "assumed"]
        unknown = {key for row in self.rows for key in row} - set(columns)
        if unknown:
            raise ValueError(f"{self.name}: no column for {sorted(unknown)}")
        used = [c for c in columns if any(str(row.get(c, "")) for row in self.rows)]
        with open(folder / f"{self.name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, used, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({c: row.get(c, "") for c in used})
        reasons = "".join(f"\n  {count} left out: {reason}" for reason, count in self.left_out.items())
        print(f"{self.name}: {len(self.rows)} rows{reasons}", file=sys.stderr)


def number(text):
    """Shortest text of a number: '8.0' is '8'."""
    value = float(text)
    return str(int(value)) if value == int(value) else repr(value)


def model_columns(raw, **more):
    row = {key: raw[key] for key in ("layers", "hidden", "heads", "kv_heads", "ffn")}
    row["head_dim"] = int(raw["hidden"]) // int(raw["heads"])
    row.update(more)
    return row


GPT = {"mlp": "gelu", "norm": "layer", "tied_embeddings": "true"}
LLAMA = {"mlp": "swiglu", "norm": "rms", "tied_embeddings": "false"}


def korthikanti(rows):
    """Table 5 and section 6.3. Megatron-LM keeps the scores of attention (no flash) and reduces gradients after the backward pass."""
    out = Set("korthikanti_2022")
    for i, r in enumerate(rows):
        if r["quantity"] != "iteration time":
            out.left_out["computed by formula, not measured" if "ANALYTIC" in r["quantity"] else "time of one layer, not of a step"] += 1
            continue
        out.add(source="korthikanti-2022", row=i + 2, profile="megatron-2022", model_name=r["model"],
                **model_columns(r, vocab=r["vocab"], **GPT), machine="hgx-a100-hdr", devices=r["gpus"], tp=r["tp"], pp=r["pp"], vpp=r["vp"], zero=0,
                sequence_parallel="true" if r["sequence_parallel"] == "yes" else "false", recompute=r["recompute"].split()[0],
                precision="fp16", micro_batch=r["micro_batch"], seq_len=r["seq_len"],
                global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="false", attention="unfused",
                measured_step_s=r["value"], measured_status="ok")
    return out


def narayanan(rows):
    """Table 1 and Table 2. Seconds are derived from TFLOP/s by the paper's own formula, so they carry its rounding (0.3 %)."""
    out = Set("narayanan_2021")
    for i, r in enumerate(rows):
        if r["micro_batch"] == "not stated":
            out.left_out["superseded table of January 2021: the micro-batch is not stated"] += 1
            continue
        zero3 = r["zero"] == "3"
        stated = r["vp"].isdigit()
        out.add(source="narayanan-2021", row=i + 2, profile="deepspeed-2021" if zero3 else "megatron-2021", model_name=r["model"],
                **model_columns(r, vocab=r["vocab"], **GPT), machine="hgx-a100-hdr", devices=r["gpus"], tp=r["tp"], pp=r["pp"],
                vpp=r["vp"] if stated else 1, zero=r["zero"], sequence_parallel="false", recompute="full", precision="fp16",
                micro_batch=r["micro_batch"], seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]),
                # torch's DDP reduces buckets under the backward pass, Megatron's own of that time after it; ZeRO-3 prefetches.
                overlap="true" if zero3 or r["ddp_impl"] == "torch" else "false", attention="unfused",
                measured_step_s=r["iter_time_s_derived"], measured_status="ok",
                assumed="vpp" if not stated and r["pp"] != "1" else "")
    return out


def megatron_core(rows):
    """Weak scaling of the README. Seconds are derived from TFLOP/s. Micro-batch, recompute and interleaving are not stated."""
    out = Set("megatron_core_h100_weak_scaling")
    for i, r in enumerate(rows):
        # 7.1B is 30 layers of 4096 and two tables of 131072 rows: the embeddings are not tied.
        out.add(source="megatron-core-r0.8", row=i + 2, profile="megatron", model_name=r["model"],
                **model_columns(r, vocab=r["vocab"], **{**GPT, "tied_embeddings": "false"}), machine="hgx-h100-ndr", devices=r["gpus"],
                tp=r["tp"], pp=r["pp"], vpp=1, zero=1, sequence_parallel="true" if r["tp"] != "1" else "false", recompute="none",
                precision="bf16", micro_batch=1, seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]),
                overlap="true", attention="fused", async_tp="true" if r["tp"] != "1" else "false",
                measured_step_s=r["iter_time_s_derived"], measured_status="ok",
                assumed="machine tied_embeddings micro_batch recompute" + (" vpp" if r["pp"] != "1" else ""))
    return out


def llm_foundry(rows):
    """MPT under FSDP1. `precision` bf16 with PURE reduces gradients in bf16; DEFAULT reduces them in fp32."""
    out = Set("llm_foundry_mpt")
    machines = {"a100_80gb": "hgx-a100-hdr", "a100_40gb": "a100-40gb-8x200-roce", "h100_80gb": "hgx-h100-ndr"}
    for i, r in enumerate(rows):
        several_nodes = int(r["gpus"]) > int(r["gpus_per_node"])
        out.add(source="llm-foundry", row=i + 2, profile="llm-foundry", model_name="mpt-" + r["model"],
                **model_columns(r, vocab=r["vocab"], **GPT), machine=machines[r["gpu_type"]], devices=r["gpus"], tp=1, pp=1,
                zero=3 if "FULL_SHARD" in r["parallelism"] else 2, sequence_parallel="false", recompute=r["activation_checkpointing"],
                precision="fp8" if "fp8" in r["precision"] else "bf16", micro_batch=r["micro_batch"], seq_len=r["seq_len"],
                global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="true", attention="fused",
                reduce_dtype="bf16" if r["fsdp_mixed_precision"] == "PURE" else "fp32",
                vintage="2023-05" if r["table_vintage"].startswith("superseded") else "2023-10",
                measured_tokens_per_s=r["tokens_per_s"], measured_status="ok",
                assumed="machine" if several_nodes and r["gpu_type"] == "h100_80gb" else "")
    return out


def torchtitan_batches(r):
    """Micro-batch, virtual stages and what of it is assumed. By default the local batch is cut into as many micro-batches as the pipeline
    has ranks, and a looped schedule has two stages a rank (torchtitan of 2024, parallelisms/pipelining_utils.py)."""
    local, pp = int(r["local_batch"]), int(r["pp"])
    if pp == 1:
        return local, 1, []
    vpp = 2 if r["pp_schedule"].startswith("Interleaved") else 1
    return local // pp, vpp, ["micro_batch"] + (["vpp"] if vpp > 1 else [])


def torchtitan(rows):
    """FSDP2 with TP, CP, PP. `compile` is torch.compile; peak memory is what PyTorch's allocator reserved, the most of any rank."""
    out = Set("torchtitan")
    for i, r in enumerate(rows):
        if r["recompute"] == "selective layer":
            out.left_out["recompute of every second layer cannot be said"] += 1
            continue
        micro_batch, vpp, assumed = torchtitan_batches(r)
        gpu = r["gpu_type"]
        machine = "hgx-a100-hdr" if gpu.startswith("A100") else "hgx-h200-ndr" if gpu.startswith("H200") else "grand-teton-h100-96gb"
        if "not stated" in r["hardware"] or "lower-TDP" in gpu:
            assumed.append("machine")
        if "not stated" in r["compile"]:
            assumed.append("compile")
        if "seq_len not stated" in r["note"]:
            assumed.append("seq_len")
        fp8 = "float8" in r["precision"]
        scaling = "rowwise" if "rowwise" in r["precision"] else "tensorwise"
        if fp8 and "wise" not in r["precision"]:
            assumed.append("fp8_scaling")
        tp, cp = int(r["tp"]), int(r["cp"])
        if cp > 1:
            assumed.append("cp_kind")
        vintage = found.group() if (found := re.search(r"20\d\d-\d\d", r["framework"])) else "2025-06"
        # As of 2025 torch.compile takes the loss too; in spring 2024 the recipes had fused norms.
        profile = "torchtitan-2025" if vintage >= "2025" else "torchtitan-2024" if vintage < "2024-06" else "torchtitan"
        out.add(source="torchtitan", row=i + 2, profile=profile, model_name=r["model"],
                **model_columns(r, vocab=r["vocab"], **LLAMA), machine=machine, devices=r["gpus"], tp=tp, pp=r["pp"], vpp=vpp, cp=cp, zero=3,
                sequence_parallel="true" if tp > 1 else "false", recompute=r["recompute"].split()[0], precision="fp8" if fp8 else "bf16",
                micro_batch=micro_batch, seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="true",
                attention="fused", cp_kind="all-gather" if cp > 1 else "", async_tp="true" if r["async_tp"] == "yes" else "false",
                compile="true" if r["compile"].startswith("yes") else "false", fp8_scaling=scaling if fp8 else "",
                # asyncTP_llama3_h100_2025-06_torchtitan.md gives its commands, which leave train_configs' enable_fsdp_float8_all_gather off.
                fp8_gather="false" if fp8 and "asyncTP" in r["source"] else "",
                # llama3-8b_h200_202506_trainy-whitefiber.md gives its command: torchrun, without the script that sets the allocator.
                expandable_segments="false" if gpu.startswith("H200") else "", vintage=vintage,
                measured_tokens_per_s=number(float(r["tokens_per_s_per_gpu"]) * int(r["gpus"])),
                measured_bytes=round(float(r["peak_mem_gib"]) * GIB) if r["peak_mem_gib"] else "",
                measured_memory_kind="reserved" if r["peak_mem_gib"] else "", measured_status="ok", assumed=" ".join(assumed))
    return out


def simumax(rows):
    """Megatron-Core on one node of B200, models with few layers. Peak memory is what the allocator had handed out (live). The launch
    scripts of the runs (simu_tools/megatron_scripts/scripts/run_pretrain_*.sh) ask for no overlap of gradients or weights. All rows
    have Transformer Engine's fused cross-entropy ("cef"), which is in the profile."""
    mla = {"kv_heads": 128, "head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "dense_layers": 1}
    experts = {"deepseekv2": {"experts": 160, "top_k": 6, "moe_ffn": 1536, "shared_experts": 2, **mla},
               "deepseekv3": {"experts": 256, "top_k": 8, "moe_ffn": 2048, "shared_experts": 1, **mla}}
    out = Set("simumax_b200")
    for i, r in enumerate(rows):
        cp = int(r["cp"])
        out.add(source="simumax-b200", row=i + 2, profile="megatron-2026", model_name=f"{r['model']}-{r['layers']}-layers",
                **model_columns(r, **{"vocab": r["vocab"], **LLAMA, **experts.get(r["model"], {})}), machine="hgx-b200-ndr",
                devices=r["gpus"], tp=r["tp"], pp=r["pp"], cp=cp, ep=r["ep"], dp=r["dp"], zero=1,
                sequence_parallel="true" if r["tp"] != "1" else "false", recompute="none", precision="bf16", micro_batch=r["micro_batch"],
                seq_len=r["seq_len"],
                global_batch_tokens=int(r["micro_batch"]) * int(r["microbatches"]) * int(r["dp"]) * int(r["seq_len"]), attention="fused",
                overlap="false", cp_kind="ulysses" if cp > 1 else "",
                measured_step_s=number(f"{float(r['real_iter_ms']) / 1000:.5f}"),
                measured_bytes=round(float(r["real_peak_alloc_gib"]) * GIB), measured_memory_kind="live", measured_status="ok",
                assumed="dense_layers" if r["model"] == "deepseekv2" else "")
    return out


def vtrain(name, rows, machine, profile, recompute, assumed):
    """Megatron-DeepSpeed, fp16, gradients reduced after the backward pass. Recompute is not stated: README.md says how it is known."""
    out = Set(name)
    composed = profile.endswith("vtrain")  # of vTrain's own model: two tables of 50257 // tp rows
    for i, r in enumerate(rows):
        tp = int(r["tp"])
        multiple = 128 * tp  # Megatron pads the vocabulary so that each rank's slice is a multiple of 128
        vocab = 50257 // tp * tp if composed else -(-50257 // multiple) * multiple
        gpt = {**GPT, "tied_embeddings": "false"} if composed else GPT
        out.add(source="vtrain", row=i + 2, profile=profile, model_name=f"gpt-{r['layers']}x{r['hidden']}",
                **model_columns(r, vocab=vocab, **gpt), machine=machine, devices=r["gpus"], tp=tp, pp=r["pp"], zero=0,
                sequence_parallel="false", recompute=recompute, precision="fp16", micro_batch=r["micro_batch"],
                seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="false", attention="unfused",
                measured_step_s=number(f"{float(r['iter_time_ms']) / 1000:.9f}"), measured_status="ok", assumed=assumed)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=pathlib.Path, help="folder with the transcribed tables")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    arguments = parser.parse_args()

    def raw(name):
        with open(arguments.raw / f"{name}.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    for converted in (
            korthikanti(raw("korthikanti_2022")), narayanan(raw("narayanan_2021")),
            megatron_core(raw("megatron_core_h100_weak_scaling")), llm_foundry(raw("llm_foundry_mpt")), torchtitan(raw("torchtitan")),
            simumax(raw("simumax_b200")), vtrain("vtrain_multi_node", raw("vtrain_multi_node_a100"), "a100-80gb-4x200-ib",
                   "megatron-deepspeed", "full", "attention recompute"),
            vtrain("vtrain_single_node", raw("vtrain_single_node_a100"), "hgx-a100-hdr",
                   "megatron-deepspeed-vtrain", "none", "attention machine recompute vocab")):
        converted.write(arguments.out)


if __name__ == "__main__":
    main()
