"""Which layout trains a model on so many devices, and what fills their memory.

    python3 which_layout.py llama-3.1-70b h100 64 4Mi
"""

import sys

import shardlab


def words(layout):
    return " ".join(f"{key}{layout[key]}" for key in ("dp", "tp", "pp", "cp", "ep") if layout[key] > 1) or "1 rank"


def main(model, machine, devices, batch):
    found = shardlab.search(model=model, machine=machine, devices=int(devices), global_batch_tokens=batch, top=5)
    if not found["layouts"]:
        print(f"no layout of {model} fits {devices} x {machine}")
        return 3
    for place, layout in enumerate(found["layouts"], 1):
        print(f"{place}. {words(layout)}: {layout['predicted_step_s']:.3g} s a step, {layout['predicted_device_bytes'] / 2**30:.1f} GiB a device")
    best = found["layouts"][0]
    keys = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "schedule", "sequence_parallel", "recompute", "micro_batch", "grad_accumulation", "seq_len")
    told = shardlab.memory(model=model, machine=machine, devices=int(devices), precision=best["precision"], **{key: best[key] for key in keys})
    worst = told["stages"][told["worst_stage"]]
    print("the best, by what holds its memory:")
    for item in sorted(worst["items"], key=lambda item: -item["bytes"]):
        print(f"  {item['bytes'] / 2**30:8.2f} GiB  {item['name']}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    try:
        sys.exit(main(*sys.argv[1:]))
    except shardlab.Refused as refused:
        sys.exit(f"{refused}")
