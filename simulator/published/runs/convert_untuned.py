#!/usr/bin/env python3
"""Turns published tables of untuned runs into the columns of `shardlab validate`.

    convert_untuned.py RAW_FOLDER [--out FOLDER]

As convert_runs.py, for tables whose layouts nobody picked: sweeps over all layouts, rounds of a benchmark, releases of a framework,
functional tests. They go to `untuned`. Python's standard library only.
"""

import argparse
import csv
import pathlib

from convert_runs import GIB, GPT, LLAMA, Set, model_columns, number

BPE_TOKENS = 50257  # of GPT-2's vocabulary, which Megatron-LM's functional tests of GPT use


# nanotron's measure_bandwidth (src/nanotron/trainer.py at 67c5ebb6): 256 Mi elements of fp32; all-gather and reduce-scatter take lists
# of tensors, so torch reads and writes the message once more (as simulator/published/kernels/convert.py has it).
BANDWIDTH_BYTES = 4 * 256 << 20
LIST_COPY_S = 2 * BANDWIDTH_BYTES / 3.0e12


def without_copies(busbw_gbps, ranks):
    """Bus bandwidth, GB/s, of an all-gather or a reduce-scatter of BANDWIDTH_BYTES over `ranks` without torch's copies of its list."""
    moved = BANDWIDTH_BYTES * (ranks - 1) / ranks
    return number(f"{moved / (moved / (float(busbw_gbps) * 1e9) - LIST_COPY_S) / 1e9:.2f}")


def nanotron(rows):
    """The Ultra-Scale Playbook's benchmark. Step times count only on a healthy network, and where the log raised no flag. What the
    bandwidth of a run was, it measured itself."""
    out = Set("nanotron_playbook")
    for i, r in enumerate(rows):
        if r["status"] not in ("ok", "OOM"):
            out.left_out["failed for another reason, or ran out of time"] += 1
            continue
        if r["flag"]:
            out.left_out["the source flags the row"] += 1
            continue
        ok = r["status"] == "ok"
        timed = ok and r["network_state"] in ("single node", "healthy")
        several = int(r["nodes"]) > 1
        fabric = {}
        for column, ours in (("ar", "all_reduce"), ("ag", "all_gather"), ("rs", "reduce_scatter")):
            def logged(field, ranks):
                return r[field] if column == "ar" or not r[field] else without_copies(r[field], ranks)
            if timed:
                fabric[f"intra_{ours}_busbw_gbps"] = logged(f"nccl_{column}_intra_gbs", min(int(r["gpus"]), int(r["gpus_per_node"])))
                if several:
                    fabric[f"{ours}_busbw_gbps"] = logged(f"nccl_{column}_gbs", int(r["gpus"]))
                fabric["busbw_bytes"] = BANDWIDTH_BYTES
        tp = int(r["tp"])
        out.add(source="nanotron-playbook", row=i + 2, profile="nanotron", model_name=f"llama-{number(r['params_b'])}B",
                **model_columns(r, vocab=r["vocab"], mlp="swiglu", norm="rms", tied_embeddings="true" if r["tied_embedding"] == "yes" else "false"),
                machine="p5-h100-efa", devices=r["gpus"], tp=tp, pp=r["pp"], zero=r["zero_stage"],
                sequence_parallel="true" if tp > 1 else "false", recompute="none", precision="bf16", micro_batch=r["micro_batch"],
                seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), attention="fused",
                vintage="fixed pipeline" if r["after_pp_fix"] == "True" else "first pipeline" if ok else "",
                measured_tokens_per_s=number(f"{float(r['tokens_per_s_per_gpu']) * int(r['gpus']):.2f}") if timed else "",
                measured_bytes=round(float(r["mem_peak_reserved_gib"]) * GIB) if ok and r["mem_peak_reserved_gib"] else "",
                measured_memory_kind="reserved" if ok else "", measured_status="ok" if ok else "oom", **fabric)
    return out


def mlperf(rows):
    """GPT-3 175B of MLPerf Training v3.0 and v3.1. Logs that a submitter hands in twice are one row."""
    out = Set("mlperf_training_llm")
    for i, r in enumerate(rows):
        if r["duplicate_of"]:
            out.left_out["the same log as another row"] += 1
            continue
        out.add(source="mlperf-nvidia", row=i + 2, profile="megatron-nemo-2023", model_name="gpt3-175b", **model_columns(r, vocab=r["vocab"], **GPT),
                machine="hgx-h100-ndr", devices=r["gpus"], tp=r["tp"], pp=r["pp"], vpp=r["vp"], zero=1, sequence_parallel="true",
                recompute="none", precision="fp8", fp8_scaling=r["fp8_recipe"], micro_batch=r["micro_batch"], seq_len=r["seq_len"],
                global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="true", attention="fused", async_tp="true",
                vintage=r["mlperf_round"], measured_step_s=r["step_time_s_median"], measured_status="ok")
    return out


FSDP_OFFLOADS = {"DGX-GB200": 40, "DGX-GB300": 20}  # cpu_offloading_num_layers of LLAMA3_70B_*_FP8_CS, the same in all tags
EXPERT_OVERLAPS = {("NeMo 25.11", "DGX-H100"), ("NeMo 26.08", "DGX-GB200"), ("NeMo 26.08", "DGX-GB300")}


def bridge(rows):
    """NVIDIA's table of its own recipes. Recompute, gradients in 16 bit and gathers of fp8 weights are those of the recipes at the tags
    (scripts/performance/configs, src/megatron/bridge/training/mixed_precision.py of NVIDIA-NeMo/Megatron-Bridge)."""
    machines = {"DGX-H100": "hgx-h100-ndr", "DGX-GB200": "gb200-nvl72", "DGX-GB300": "gb300-nvl72", "DGX-B200": "hgx-b200-ndr",
                "DGX-B300": "hgx-b300-xdr"}
    out = Set("megatron_bridge_perf_summary")
    for i, r in enumerate(rows):
        if r["task"] == "LoRA":
            out.left_out["adapters, whose base weights have no gradients"] += 1
            continue
        precision = r["precision"].lower()
        kind = "fp4" if "fp4" in precision else "bf16" if precision == "bf16" else "fp8"
        hopper = r["system"] == "DGX-H100"
        scaling = "" if kind != "fp8" else "blockwise" if "sub-channel" in precision and hopper else "mx" if "mx" in precision else "tensorwise"
        moe = bool(r["moe"])
        shape = model_columns(r, vocab=r["vocab"], **LLAMA)
        assumed = []
        if moe:
            shape.update(head_dim=128, experts=128, top_k=8, moe_ffn=1536)
        pp, tp = int(r["pp"]), int(r["tp"])
        vpp = int(r["vp"]) if r["vp"].isdigit() and pp > 1 else 1
        # Where a cell has two layouts, one in parentheses, the micro-batch is that of the first; the accumulation is told for both.
        dp = int(r["gpus"]) // (tp * pp)
        micro_batch = int(r["global_batch"]) // (dp * int(r["grad_accum"])) if "parenthesised" in precision else r["micro_batch"]
        graphs = r["cuda_graph"]
        if not graphs:
            assumed.append("cuda_graphs")
        fsdp = r["fsdp"].isdigit() and int(r["fsdp"]) > 1
        # Releases whose recipe the table does not name: as the tags v0.1.0rc4 (25.09), v0.2.0 (25.11) and v0.6.0 (26.08) have it.
        offloaded = r["cpu_offload_layers"] or (FSDP_OFFLOADS[r["system"]] if fsdp else "")
        overlapped = r["moe_a2a_overlap"] == "True" or (moe and (r["release"], r["system"]) in EXPERT_OVERLAPS)
        out.add(source="megatron-bridge", row=i + 2, profile="megatron-bridge", model_name=r["model"], **shape, machine=machines[r["system"]],
                devices=r["gpus"], tp=tp, pp=pp, vpp=vpp, ep=int(r["ep"]) if r["ep"].isdigit() else 1, expert_tp=1 if moe else "",
                zero=3 if fsdp else 1, sequence_parallel="true" if tp > 1 else "false", recompute="none", precision=kind,
                fp8_scaling=scaling, micro_batch=micro_batch, seq_len=r["seq_len"],
                global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]), overlap="true", attention="fused",
                async_tp="true" if tp > 1 and kind != "fp4" else "false",
                # 94 layers, embedding and head are 96 of equal weight (account_for_embedding_in_pipeline_split and _loss_).
                stage_split="embedding+head" if moe and pp > 1 else "",
                offload="activations=cpu" if offloaded else "", offload_layers=offloaded, expert_overlap="true" if overlapped else "",
                cuda_graphs="step" if "full_iteration" in graphs else "layers" if graphs.startswith("transformer_engine") else "none" if graphs else "",
                gradient_fusion="false" if fsdp else "",
                vintage=r["release"].removeprefix("NeMo "), measured_tokens_per_s=number(float(r["tokens_per_s_per_gpu"]) * int(r["gpus"])),
                measured_status="ok", assumed=" ".join(assumed))
    return out


def llmq(rows):
    """LLMQ on boxes of RTX PRO 6000. Rows whose printed command does not give the logged tokens are left out."""
    recomputes = {"": "none", "recompute-block": "full", "recompute-ffn;recompute-norm": "norms,up"}
    dtypes = {"e4m3": "fp8", "bf16": "bf16"}
    out = Set("llmq_single_box")
    for i, r in enumerate(rows):
        if r["use_for_validation"] != "yes":
            out.left_out["the printed command does not give the logged tokens"] += 1
            continue
        flags = set((r["other_flags"] + ";" + r["sharding"]).split(";"))
        chunks = [f.split("=")[1] for f in flags if f.startswith("lmhead-chunks=")]
        zero = 3 if "shard-weights" in flags else 2 if "shard-gradients" in flags else 1
        moved = set(r["offload"].split(";")) if r["offload"] else set()
        optimizer = [name for name, flag in (("master", "offload-master"), ("m", "offload-opt-m"), ("v", "offload-opt-v")) if flag in moved]
        offload = [f"{name}=cpu" for name in optimizer] + (["activations=cpu"] if "offload-residual" in moved else [])
        gpus = int(r["gpus"])
        out.add(source="llmq", row=i + 2, profile="llmq", model_name=r["model"],
                **model_columns(r, vocab=r["vocab"], mlp="swiglu", norm="rms", tied_embeddings="true" if r["tied_embedding"] == "yes" else "false"),
                machine="rtx-pro-6000-pcie", devices=gpus, tp=1, pp=1, zero=zero, recompute=recomputes[r["recompute"]], offload=" ".join(offload),
                precision=dtypes[r["matmul_dtype"]], fp8_scaling="tensorwise" if r["matmul_dtype"] == "e4m3" else "",
                micro_batch=r["micro_batch"], seq_len=r["seq_len"], global_batch_tokens=int(r["global_batch"]) * int(r["seq_len"]),
                # --model-dtype is that of the master weights too (README.md of llmq: --master-dtype defaults to it).
                master_dtype="bf16", moment_dtype=r["opt_m_dtype"], head_chunks=chunks[0] if chunks else "",
                cuda_graphs="step" if "use-cuda-graphs" in flags else "none", measured_step_s=r["step_time_s_median"], measured_status="ok")
    return out


def golden_model(r):
    hidden, heads = int(r["hidden_size"]), int(r["num_attention_heads"])
    swiglu = r["swiglu"] == "True"
    ffn = r["ffn_hidden_size"] or (int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden)
    multiple = int(r["make_vocab_size_divisible_by"] or 128) * int(r["tensor_model_parallel_size"] or 1)
    vocab = -(-int(r["vocab_size"] or BPE_TOKENS) // multiple) * multiple
    row = {"layers": r["num_layers"], "hidden": hidden, "heads": heads,
           "kv_heads": r["num_query_groups"] if r["group_query_attention"] == "True" else heads, "head_dim": r["kv_channels"] or hidden // heads,
           "ffn": ffn, "vocab": vocab, "mlp": "swiglu" if swiglu else "gelu", "norm": "rms" if r["normalization"] == "RMSNorm" else "layer",
           "tied_embeddings": "false" if r["untie_embeddings_and_output_weights"] == "True" else "true",
           "biases": "false" if r["disable_bias_linear"] == "True" else "true",
           "positions": "rotary" if r["position_embedding_type"] == "rope" else "learned"}
    if r["num_experts"]:
        row.update(experts=r["num_experts"], top_k=r["moe_router_topk"] or 2, moe_ffn=r["moe_ffn_hidden_size"] or ffn)
        shared = r["moe_shared_expert_intermediate_size"]
        if shared:
            row["shared_experts"] = int(shared) // int(row["moe_ffn"]) if int(shared) % int(row["moe_ffn"]) == 0 else None
    return row


def golden_unsayable(r):
    """Why a test's run is none that the columns can say, or nothing."""
    if r["family"] in ("bert", "mimo", "nemotron"):
        return "no decoder of text alone"
    if not r["gpus"] or float(r["dp"]) < 1:
        return "the number of devices is not stated"
    if int(r["global_batch_size"]) % (int(r["micro_batch_size"]) * round(float(r["dp"]))):
        return "the batch does not divide among the ranks: a check of gradients"
    if r["mtp_num_layers"] or r["moe_layer_freq"] or r["position_embedding_type"] == "none":
        return "heads that predict several tokens, or layers of several kinds"
    if r["multi_latent_attention"] or r["fp8_format"] or r["use_megatron_fsdp"] == "True" or r["optimizer"] == "muon":
        return "latent attention, fp8, FSDP or Muon: a handful of tests each"
    if "defer_embedding_wgrad" in r["test_case"]:
        return "the head's weight gradient is put off, and its inputs are kept until then"
    if r["test_type"].startswith("frozen"):
        return "the framework of an old release, kept for its checkpoints"
    return ""


def golden(rows):
    """Bytes that Megatron-LM's functional tests log: of the last rank. What is alive at the end of a step and the most of it; step times of
    models this small, in deterministic mode, say little and are left out."""
    out = Set("megatron_golden_values")
    for i, r in enumerate(rows):
        reason = golden_unsayable(r)
        model = golden_model(r) if not reason else {}
        if not reason and model.get("shared_experts", 0) is None:
            reason = "a shared expert narrower than the others"
        if reason:
            out.left_out[reason] += 1
            continue
        pp, tp, cp, ep = (int(r[k] or 1) for k in ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size",
                                                    "expert_model_parallel_size"))
        layers_each = r["num_layers_per_virtual_pipeline_stage"]
        vpp = int(r["num_virtual_stages_per_pipeline_rank"] or 0) or (int(r["num_layers"]) // pp // int(layers_each) if layers_each else 1)
        # The oldest goldens are of images whose Transformer Engine had no fused attention that is deterministic: what they keep says so.
        no_fused = not r["attention_backend"] and "dracooci" in r["golden"] and not r["test_case"].endswith("reshard_1x4xNone")
        recompute = r["recompute_granularity"] or "none"
        if recompute == "selective" and r["recompute_modules"]:
            recompute = {"[moe_act]": "activation"}.get(r["recompute_modules"], "")
        # Tests whose model_config.yaml leaves out CUBLAS_WORKSPACE_CONFIG; those with context parallelism are also without dropout.
        plain = cp > 1 or "_reshard_" in r["test_case"] or "cross_entropy_loss_fusion" in r["test_case"]
        profile = "megatron-functional-local" if r["transformer_impl"] == "local" else "megatron-functional-plain" if plain else "megatron-functional"
        out.add(source="megatron-golden", row=i + 2, profile=profile, model_name=r["test_case"], **model,
                machine={"dgx_h100": "hgx-h100-ndr", "h100": "hgx-h100-ndr", "dgx_gb200": "gb200-nvl72"}.get(r["gpu_type"], "hgx-a100-hdr"),
                # --account-for-embedding-in-pipeline-split; --decoder-first-pipeline-num-layers 2 and -last- 2.
                stage_split="embedding+head" if "account_for_embedding_loss" in r["test_case"]
                else "first=2 last=2" if r["test_case"].endswith("uneven_pipeline") else "",
                devices=r["gpus"], tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, expert_tp=(r["expert_tensor_parallel_size"] or tp) if r["num_experts"] else "",
                zero=1 if r["use_distributed_optimizer"] == "True" else 0, sequence_parallel="true" if r["sequence_parallel"] == "True" else "false",
                recompute=recompute, precision="bf16" if r["bf16"] == "True" else "fp16" if r["fp16"] == "True" else "fp32",
                micro_batch=r["micro_batch_size"], seq_len=r["seq_length"], global_batch_tokens=int(r["global_batch_size"]) * int(r["seq_length"]),
                overlap="true" if r["overlap_grad_reduce"] == "True" else "false",
                attention="unfused" if no_fused or r["attention_backend"] in ("unfused", "local") or r["transformer_impl"] == "local" else "fused",
                # --num-distributed-optimizer-instances 2; --microbatch-group-size-per-virtual-pipeline-stage 5.
                hybrid_shard=round(float(r["dp"])) * cp // 2 if "multi_dist_optimizer_instances" in r["test_case"] else "",
                micro_batch_group=5 if "tunable_overlap" in r["test_case"] else "",
                dropout=0 if cp > 1 else 0.1, gradient_fusion="false" if r["no_gradient_accumulation_fusion"] == "True" else "true",
                assumed="attention" if no_fused else "", memory_rank="last", vintage=r["golden"].removeprefix("golden_values_").removesuffix(".json"),
                measured_bytes=r["mem_max_allocated_bytes_last"], measured_memory_kind="live", measured_status="ok")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=pathlib.Path, help="folder with the transcribed tables")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "untuned")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    for convert, name in ((nanotron, "nanotron_playbook"), (mlperf, "mlperf_training_llm"), (bridge, "megatron_bridge_perf_summary"),
                          (llmq, "llmq_single_box"), (golden, "megatron_golden_values")):
        with open(arguments.raw / f"{name}.csv", newline="", encoding="utf-8") as file:
            convert(list(csv.DictReader(file))).write(arguments.out)


if __name__ == "__main__":
    main()
