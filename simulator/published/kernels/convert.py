#!/usr/bin/env python3
"""Turns the published kernel and collective tables into the rows that DeviceModel and Fabric are fitted to and scored on.

    convert.py RAW_FOLDER OUT_FOLDER

RAW_FOLDER holds kernels.csv, operator_samples_a100_gh200.csv, liger_membound_kernels.csv and collectives.csv as collected from the
sources that their `source` column names. What is kept, what is left out and why: README.md beside this script. Standard library only.
"""
import csv
import json
import os
import sys

MATMUL = ["device", "family", "regime", "precision", "product", "m", "n", "k", "batch", "out_bytes", "accumulate", "seconds",
          "source"]
ATTENTION = ["device", "family", "regime", "kernel", "pass", "batch", "heads", "kv_heads", "queries", "head_dim", "value_dim",
             "causal", "seconds", "source"]
MEMORY = ["device", "family", "kind", "bytes", "launches", "seconds", "source"]
COLLECTIVE = ["machine", "family", "kind", "ranks_per_node", "nodes", "groups_per_node", "bytes", "seconds", "source"]
QUANTISED = ["device", "recipe", "m", "k", "n", "speedup", "source"]

SOURCE = {
    "VIA-Research/vTrain": "vtrain", "NetX-lab/Echo": "echo", "openxla/xla": "xla", "DebarghaG/estimate-train-time":
    "estimate-train-time", "boeschf/nccl-benchmark-on-alps": "alps", "aws-samples/awsome": "awsome", "Azure/AI-benchmarking-guide":
    "azure", "stas00/ml-engineering": "stas00", "lessizzmore/create-a3mega": "a3mega", "HF Ultra-Scale": "playbook",
    "MooreThreads/SimuMax": "simumax", "deepseek-ai/DeepGEMM": "deepgemm", "linkedin/Liger": "liger"}


def short(source):
    for start, name in SOURCE.items():
        if source.startswith(start):
            return name
    return ""


def rows(folder, name):
    with open(os.path.join(folder, name), newline="") as f:
        yield from csv.DictReader(f)


def shape_of(text):
    return dict(part.strip().split("=", 1) for part in text.replace(";", ",").split(",") if "=" in part)


def simumax(r, out):
    """SimuMax's tables: efficiency = flops / time / its reference peak; sdp counts all scores, and 2.5 times as much backward."""
    device = {"A100-PCIe-80GB": "a100-pcie-80gb", "B200-SXM": "b200-hgx-180gb"}[r["gpu_type"]]
    rate = float(r["efficiency"]) * float(r["reference_peak_tflops"]) * 1e12
    if rate <= 0:
        return
    s = shape_of(r["shape"])
    if r["kernel"] == "matmul":
        m, n, k, b = (int(float(r[x])) for x in ("m", "n", "k", "batch"))
        product = {"TN": "forward", "NN": "input", "NT": "weight"}[r["layout"]]
        out["matmul"].append([device, "linear", "sustained", "bf16", product, m, n, k, b, 4 if r["out_dtype"] == "fp32" else 2,
                              int(r["accumulate"] == "True"), 2 * m * n * k * b / rate, "simumax"])
    elif r["kernel"] == "group_matmul":
        g, m, n, k = int(s["ng"]), int(s["M"]), int(s["N"]), int(s["K"])
        product = {"fwd": "forward", "bwd_grad_act": "input", "bwd_grad_w": "weight"}[s["stage"]]
        wide = 4 if s["main_grad_dtype"] == "fp32" and product == "weight" else 2
        dims = (n, k, m) if product == "weight" else (m, n, k)
        out["matmul"].append([device, "grouped", "sustained", "bf16", product, *dims, g, wide, int(s["accumulate"] == "True"),
                              2 * g * m * n * k / rate, "simumax"])
    elif r["kernel"] in ("sdp_fwd", "sdp_bwd"):
        b, q, h, kv, d, v = (int(s[x]) for x in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim"))
        backward = r["kernel"] == "sdp_bwd"
        flops = 2 * b * h * q * q * (d + v) * (2.5 if backward else 1)
        out["attention"].append([device, "sdp", "sustained", "fused", "backward" if backward else "forward", b, h, kv, q, d, v, 1,
                                 flops / rate, "simumax"])


def tables(r, out):
    """XLA's table of short runs, Azure's and DeepGEMM's of long ones, the best shapes that stas00's search found."""
    device = {"B200": "b200-hgx-180gb", "H100 (key sm_90)": "h100-sxm5-80gb", "MI350/MI355 (key gfx950)": "mi355x-288gb",
              "A100-80GB": "a100-sxm4-80gb", "H100-80GB": "h100-sxm5-80gb", "H200-141GB": "h200-sxm5-141gb",
              "H800-SXM": "h800-sxm5-80gb", "NVIDIA A100 PCIe": "a100-pcie-80gb", "NVIDIA A100 SXM": "a100-sxm4-80gb",
              "NVIDIA B200 SXM": "b200-hgx-180gb", "NVIDIA B300 SXM": "b300-hgx-288gb", "NVIDIA GB200 SXM": "gb200-186gb",
              "NVIDIA GH200 SXM": "gh200-96gb", "NVIDIA H100 SXM": "h100-sxm5-80gb", "NVIDIA H200 SXM": "h200-sxm5-141gb"}
    if r["gpu_type"] not in device or not r["m"] or not r["tflops"]:
        return
    m, n, k = (int(float(r[x])) for x in ("m", "n", "k"))
    if r["kernel"] == "gemm cublasLt":
        m, n = n, m  # column-major: the row of a result, which is contiguous, has m elements there
    b = int(float(r["batch"] or 1))
    family = {"gemm": "table", "gemm cublasLt": "large", "dense fp8 GEMM": "fp8 blocks",
              "matmul MAMF (best shape found)": "best shape"}.get(r["kernel"], "grouped fp8")
    regime = "burst" if family in ("table", "best shape") else "sustained"
    precision = "fp8" if r["dtype"].startswith("fp8") else "bf16"
    out["matmul"].append([device[r["gpu_type"]], family, regime, precision, "forward", m, n, k, b, 2, 0,
                          2 * m * n * k * b / (float(r["tflops"]) * 1e12), short(r["source"])])


def kernels(folder, out):
    for r in rows(folder, "kernels.csv"):
        if "SimuMax" in r["source"]:
            simumax(r, out)
        elif r["kernel"].startswith(("gemm", "dense fp8", "grouped fp8 GEMM contiguous", "matmul MAMF")):
            tables(r, out)
        elif r["kernel"].startswith("hbm_stream_"):
            device = {"A100-80GB": "a100-sxm4-80gb", "H100-80GB": "h100-sxm5-80gb", "H200-141GB": "h200-sxm5-141gb"}[r["gpu_type"]]
            size = 3 << 28  # arrays of 256 MiB, three of them: the rate does not depend on it
            out["memory"].append([device, r["kernel"][4:].replace("_", " "), "elementwise", size, 1,
                                  size / (float(r["mem_gbs"]) * 1e9), "azure"])


# cudnn-frontend's benchmark of SDPA on H200 (cuDNN 9.19.1, bf16, head_dim 128, 64 heads, 8 of keys and values): Tflop/s of the scores
# that are not masked, 2.5 times the forward flops backward. Columns: tokens, causal, forward, backward.
CUDNN_H200 = [(2048, 1, 484, 370), (4096, 1, 591, 474), (8192, 1, 644, 541), (16384, 1, 673, 579), (32768, 1, 688, 581),
              (8192, 0, 691, 594), (16384, 0, 702, 612)]


def cudnn(out):
    for s, causal, forward, backward in CUDNN_H200:
        flops = 2 * 64 * s * s * 256 * (0.5 if causal else 1)
        for name, factor, rate in (("forward", 1, forward), ("backward", 2.5, backward)):
            out["attention"].append(["h200-sxm5-141gb", "cudnn", "sustained", "fused", name, 1, 64, 8, s, 128, 128, causal,
                                     flops * factor / (rate * 1e12), "cudnn-frontend"])


# One linear forward and backward in float8 with scales of rows, against bf16: pytorch/ao docs/static/fp8-rowwise-perf.png of June 2025,
# per cent of bf16's speed. A block of six lines is one M, a line one K, a column one N; each from 1024 to 32768, doubling.
QUANTISED_H100 = """
     42  42  50  51  56  56
     40  38  42  50  50  56
     48  43  46  53  57  60
     45  48  54  62  60  62
     46  48  54  60  60  61
     45  50  55  60  62  65
     43  43  48  55  62  65
     38  45  58  65  72  75
     43  50  68  78  81  82
     46  58  73  82  87  89
     48  62  75  83  84  85
     50  64  75  84  83  99
     45  47  57  66  72  76
     43  53  70  83  90  91
     44  64  84 101 101 104
     53  72  91 101 107 113
     53  74  92 105 110 118
     54  75  93 102 117 118
     48  52  65  77  83  84
     45  64  82 101 103 106
     52  76 100 113 117 119
     59  85 105 120 131 141
     58  82 103 122 137 140
     59  82 104 130 136 146
     48  58  73  86  85  89
     51  70  90 105 107 115
     57  79 102 120 126 140
     61  87 108 133 139 149
     59  83 107 134 142 155
     60  85 116 135 148 172
     51  62  77  87  88  94
     54  73  91 108 114 127
     59  81 104 128 135 149
     63  87 111 141 150 162
     60  83 116 139 149 173
     63  93 116 148 170 152
"""


def quantised(out):
    sizes = [1024 << i for i in range(6)]
    speeds = iter(QUANTISED_H100.split())
    for m in sizes:
        for k in sizes:
            for n in sizes:
                out["quantised_linear"].append(["grand-teton-h100-96gb", "rowwise", m, k, n, int(next(speeds)) / 100, "torchao"])


# Large products of random numbers, repeated, Tflop/s. H100 SXM: torch.matmul of n x n matrices in PyTorch 2.7 with CUDA 12.8
# (zzc0721/torch-performance-test-data#79). The H100 of 96 GB that is held to 500 W: cuBLAS in bf16, and the fp8 product with scales of
# rows of FBGEMM (pytorch/FBGEMM#2546).
LONG_RUNS = [("h100-sxm5-80gb", "bf16", (4096, 4096, 4096), 788.72), ("h100-sxm5-80gb", "bf16", (8192, 8192, 8192), 797.51),
             ("h100-sxm5-80gb", "bf16", (10240, 10240, 10240), 719.72), ("h100-sxm5-80gb", "fp16", (4096, 4096, 4096), 760.04),
             ("h100-sxm5-80gb", "fp16", (8192, 8192, 8192), 736.19), ("h100-sxm5-80gb", "fp16", (10240, 10240, 10240), 668.42),
             ("grand-teton-h100-96gb", "bf16", (8192, 8192, 8192), 585.23),
             ("grand-teton-h100-96gb", "bf16", (65536, 8192, 7168), 575.12),
             ("grand-teton-h100-96gb", "bf16", (65536, 3584, 8192), 546.31),
             ("grand-teton-h100-96gb", "fp8", (8192, 8192, 8192), 1125.51),
             ("grand-teton-h100-96gb", "fp8", (65536, 8192, 7168), 1082.75),
             ("grand-teton-h100-96gb", "fp8", (65536, 3584, 8192), 1141.38)]


def long_runs(out):
    for device, precision, (m, n, k), tflops in LONG_RUNS:
        source = "fbgemm" if device.startswith("grand") else "zzc0721"
        out["matmul"].append([device, "large", "sustained", precision, "forward", m, n, k, 1, 2, 0, 2 * m * n * k / (tflops * 1e12),
                              source])


OPERATOR_DEVICE = {"A100-SXM4-80GB": "a100-sxm4-80gb", "GH200-120GB (H100 96GB HBM3)": "gh200-96gb"}


def operators(folder, out):
    """One row in five of the matmuls and in eight of the batched ones: 18,000 rows on a regular grid say no more than 3,000."""
    seen = {}
    for r in rows(folder, "operator_samples_a100_gh200.csv"):
        op, device = r["op"], OPERATOR_DEVICE[r["gpu_type"]]
        seen[op, device] = seen.get((op, device), 0) + 1
        index = seen[op, device]
        get = lambda key: int(float(r[key] or 1))
        forward = float(r["fwd_us"] or 0) * 1e-6
        backward = float(r["bwd_us"] or 0) * 1e-6
        b, s, h, mp, heads = get("b"), get("seq"), get("hidden"), get("mp"), get("heads")
        tokens = b * s
        source = "estimate-train-time"

        def memory(family, kind, size, seconds):
            out["memory"].append([device, family, kind, size, 1, seconds, source])

        if op.startswith("linear") and index % 5 == 0:
            m, n, k = get("m"), get("n"), get("k")
            # Their backward is left out: the gradient was all ones, and such products draw less power and run faster (96 % of the
            # peak on GH200, above any measured maximum on A100).
            out["matmul"].append([device, "linear", "sustained", "bf16", "forward", m, n, k, 1, 2, 0, forward, source])
        elif op in ("bmm", "baddbmm") and index % 8 == 0:
            m, n, k, batch = get("m"), get("n"), get("k"), get("batch")
            product = "input" if op == "bmm" else "forward"
            out["matmul"].append([device, op, "sustained", "bf16", product, m, n, k, batch, 2, 0, forward, source])
        elif op == "flash_atten" and index % 4 == 0:
            d = h // heads
            if d > 256:
                continue
            row = [b, heads // mp, heads // mp, s, d, d, 0]
            out["attention"].append([device, "flash", "sustained", "flash_2", "forward", *row, forward, source])
            if device.startswith("a100") and not r["flag"].startswith("bwd_above"):
                out["attention"].append([device, "flash", "sustained", "flash_2", "backward", *row, backward, source])
        elif index % 3 != 0:
            continue
        elif op == "res_add":
            memory("residual add", "elementwise", 6 * tokens * h, forward)
        elif op == "gelu":
            memory("gelu", "activation", 4 * tokens * 4 * h // mp, forward)
            memory("gelu backward", "activation", 6 * tokens * 4 * h // mp, backward)
        elif op == "layernorm":
            memory("layer norm", "norm", 4 * tokens * h, forward)
            memory("layer norm backward", "norm_backward", 6 * tokens * h, backward)
        elif op == "ScaledUpperTriangMaskedSoftmax":
            scores = b * heads // mp * s * s
            memory("masked softmax", "softmax", 4 * scores, forward)
            memory("masked softmax backward", "softmax", 6 * scores, backward)
        elif op == "embedding" and mp == 1:
            memory("embedding", "embedding", 4 * tokens * h, forward)
        elif op == "middleStage_optimizer" and device.startswith("a100"):
            # 12 h^2 parameters a layer; 28 bytes each: gradient and master, both moments, parameter, as FusedAdam moves them
            memory("fused adam", "optimizer", 28 * get("opt_layers") * 12 * h * h // mp, forward)


def liger(folder, out):
    """Triton kernels of one pass; dtype as stated, bfloat16 logits. One GPU is an A100 SXM 80GB, the other an H100 SXM."""
    device = {"NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb", "NVIDIA H100 80GB HBM3": "h100-sxm5-80gb"}
    for r in rows(folder, "liger_membound_kernels.csv"):
        if r["metric"] != "speed" or r["provider"] not in ("liger", "huggingface") or r["gpu_type"] not in device:
            continue
        c = json.loads(r["config"])
        x = int(float(r["x_value"]))
        wide = 2 if "bfloat16" in c.get("dtype", "bfloat16") else 4
        row = lambda family, kind, size: out["memory"].append([device[r["gpu_type"]], family, kind, size, 1,
                                                               float(r["median"]) * 1e-3, "liger"])
        if r["mode"] == "forward" and (r["kernel"], r["provider"]) in (("rms_norm", "liger"), ("layer_norm", "liger"),
                                                                        ("layer_norm", "huggingface")):
            row(r["kernel"].replace("_", " ") + " forward", "norm", 2 * wide * c["M"] * x)
        elif r["mode"] == "forward" and r["kernel"] == "cross_entropy" and r["provider"] == "liger":
            row("cross entropy with gradient", "cross_entropy", 3 * 2 * c["B"] * c["T"] * x)


# nanotron's measure_bandwidth (src/nanotron/trainer.py at 67c5ebb6, which wrote the playbook's rates) times 256 Mi elements of fp32, though its
# comment says 256 MB. Its all-gather and reduce-scatter take lists of tensors, which torch copies out of or into one buffer on the
# collective's stream (ProcessGroupNCCL.cpp): the message is read and written once more, at the rate of Azure's stream on H100.
PLAYBOOK_BYTES = 4 * 256 << 20
PLAYBOOK_COPY_S = 2 * PLAYBOOK_BYTES / 3.0e12


def playbook_seconds(kind, ranks, busbw):
    """Seconds of a collective of PLAYBOOK_BYTES over `ranks`, without torch's copies, from the bus bandwidth in B/s that nanotron logged."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks}.get(kind, (ranks - 1) / ranks)
    return PLAYBOOK_BYTES * factor / busbw - (0 if kind == "all_reduce" else PLAYBOOK_COPY_S)


def collectives(folder, out):
    """Sizes of 64 KiB and more (XLA's: 1 MiB, as each of its rows carries a launch); no degraded or mixed runs."""
    kinds = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "all_to_all": 0, "send_recv": 0, "send_recv_permute": 0}
    for r in rows(folder, "collectives.csv"):
        source, note, net = short(r["source"]), r["note"], r["interconnect"]
        size, n = int(float(r["bytes"] or 0)), int(r["gpus"])
        if r["collective"] not in kinds or n < 2 or size < (1 << 20 if source == "xla" else 1 << 16):
            continue
        if "degraded" in note or "broken" in note or "no RDMA" in note:
            continue
        if source == "estimate-train-time" and r["collective"] == "all_gather":
            continue  # gathers into a list and copies out
        if r["inplace"] == "in-place" and source != "azure":
            continue  # the other half of the same run
        machine = machine_of(r["gpu_type"], net, source, r["source"])
        if not machine:
            continue
        nodes = int(r["nodes"] or 1)
        time = float(r["time_us"] or 0) * 1e-6
        if time <= 0:  # only the bus bandwidth is given
            factor = {"all_reduce": 2 * (n - 1) / n}.get(r["collective"], (n - 1) / n)
            time = size * factor / (float(r["busbw_gbs"]) * 1e9)
        if source == "playbook":
            size, time = PLAYBOOK_BYTES, playbook_seconds(r["collective"], n, float(r["busbw_gbs"]) * 1e9)
        if r["collective"] == "send_recv_permute":
            if "ring-shift" not in note:
                continue  # the pattern of a pipeline: every device sends to the next
            out["collectives"].append([machine, f"{source} {net_word(net, nodes)}", "send_recv", 2, 1, 1, size, time, source])
            continue
        groups = int(note.split(" concurrent")[0].split()[-1]) if "concurrent groups" in note else 1
        out["collectives"].append([machine, f"{source} {net_word(net, nodes)}", r["collective"], n // nodes, nodes,
                                   groups if nodes == 1 else 1, size, time, source])


# nccl-tests all-reduce of 8 GiB on 4 to 8 devices of an H200 node: busbw in GB/s (stas00/ml-engineering network/README.md).
STAS00_H200 = [(4, 363), (5, 414), (6, 436), (7, 460), (8, 473)]


def stas00(out):
    for n, busbw in STAS00_H200:
        out["collectives"].append(["hgx-h200-ndr", "stas00 within a node", "all_reduce", n, 1, 1, 8 << 30,
                                   (8 << 30) * 2 * (n - 1) / n / (busbw * 1e9), "stas00"])


def net_word(net, nodes):
    return "within a node" if nodes == 1 else "between nodes"


def machine_of(gpu, net, source, full):
    if source == "xla":
        return {"H100 (key sm_90)": "hgx-h100-ndr", "B200": "hgx-b200-ndr", "GB200": "gb200-nvl72",
                "MI350/MI355 (key gfx950)": "mi355x-8"}.get(gpu, "")
    if gpu == "A100":
        return "hgx-a100-hdr"
    if gpu == "A100-SXM4-40GB":
        return "nd-a100-v4"
    if gpu == "A100-80GB":
        return "hgx-a100-hdr" if source == "azure" else ""
    if gpu == "GH200-120GB":
        return "gh200-1-ndr" if "InfiniBand" in net else "gh200-4-slingshot" if "1.13.0" in full or source == "alps" else ""
    if gpu == "H100-80GB":
        return "hgx-h100-ndr" if source == "azure" else "a3-mega" if source == "a3mega" else "p5-h100-efa"
    if gpu == "H200-141GB":
        return "hgx-h200-ndr"
    if gpu == "B200":
        return "p6-b200-efa"
    return ""


def number(x):
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def write(folder, name, header, table):
    with open(os.path.join(folder, name), "w", newline="") as f:
        w = csv.writer(f, lineterminator="\n")
        w.writerow(header)
        w.writerows([[number(x) for x in row] for row in sorted(set(map(tuple, table)), key=str)])


def main():
    raw, folder = sys.argv[1], sys.argv[2]
    out = {"matmul": [], "attention": [], "memory": [], "collectives": [], "quantised_linear": []}
    kernels(raw, out)
    operators(raw, out)
    cudnn(out)
    quantised(out)
    long_runs(out)
    liger(raw, out)
    collectives(raw, out)
    stas00(out)
    for name, header in (("matmul", MATMUL), ("attention", ATTENTION), ("memory", MEMORY), ("collectives", COLLECTIVE),
                         ("quantised_linear", QUANTISED)):
        write(folder, name + ".csv", header, out[name])
        print(name, len(out[name]))


if __name__ == "__main__":
    main()
