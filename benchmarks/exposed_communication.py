#!/usr/bin/env python3
"""Exposed communication over a shaped link: predicted and measured, over cases that calibration never saw.

    exposed_communication.py SHARDLAB OUT [--rates 200,1000] [--only NAME,NAME] [--steps 40]

Two hosts (network namespaces of tests/wires/hosts.sh) are joined by a link of each rate, in Mbit/s. Each host has one core and one rank.

1. Compute is calibrated on one core (`shardlab calibrate`): OUT/core.yaml.
2. The link is measured (`shardlab comm`): OUT/RATE/comm.csv. Both make a machine of two nodes of one device: OUT/RATE/machine.yaml.
3. The cases are predicted on that machine: OUT/RATE/predicted.
4. The cases are trained across the link: OUT/RATE/measured.

OUT/rows.csv has one row for each case: exposed communication as a share of the step, predicted and measured. The mean and the worst error
and Kendall's tau of the two orders are printed. What is there is not done again: a study that was stopped goes on with the same command.
The whole takes seven to ten minutes on two cores that do nothing else, and says nothing on busy ones. Exit code 77: no right to make namespaces.
"""
import argparse
import csv
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
HOSTS = HERE.parent / "tests" / "wires" / "hosts.sh"
PORT = 29500
COLLECTIVES = "all_reduce,reduce_scatter,all_gather"

SMALL = "model.layers: 4, model.hidden: 128, model.heads: 4, model.kv_heads: 4, model.head_dim: 32, model.ffn: 512"
MEDIUM = "model.layers: 4, model.hidden: 256, model.heads: 4, model.kv_heads: 4, model.head_dim: 64, model.ffn: 1024"

# Name, model and settings of each case. dp is 2 where nothing else is said. Tokens of a step: 4096 of the small model, 2048 of the other.
CASES = [
    ("small-128k", SMALL, "bucket_bytes: 128Ki"),
    ("small-512k", SMALL, "bucket_bytes: 512Ki"),
    ("small-512k-serial", SMALL, "bucket_bytes: 512Ki, overlap: false"),
    ("small-2m", SMALL, "bucket_bytes: 2Mi"),
    ("small-2m-serial", SMALL, "bucket_bytes: 2Mi, overlap: false"),
    ("small-long", SMALL, "bucket_bytes: 512Ki, train.global_batch_tokens: 16384, micro_batch: 128"),
    ("small-zero1", SMALL, "zero: 1, bucket_bytes: 512Ki"),
    ("small-zero1-serial", SMALL, "zero: 1, bucket_bytes: 512Ki, overlap: false"),
    ("small-zero2", SMALL, "zero: 2, bucket_bytes: 512Ki"),
    ("small-zero3", SMALL, "zero: 3"),
    ("medium-1m", MEDIUM, "train.global_batch_tokens: 2048, micro_batch: 16, bucket_bytes: 1Mi"),
    ("medium-4m", MEDIUM, "train.global_batch_tokens: 2048, micro_batch: 16, bucket_bytes: 4Mi"),
    ("medium-4m-serial", MEDIUM, "train.global_batch_tokens: 2048, micro_batch: 16, bucket_bytes: 4Mi, overlap: false"),
    ("small-tp", SMALL, "dp: 1, tp: 2, bucket_bytes: 0, train.global_batch_tokens: 1024, micro_batch: 16"),
    ("small-pp", SMALL, "dp: 1, pp: 2, bucket_bytes: 0, schedule: 1f1b, micro_batch: 16, grad_accumulation: 4"),
]


def sweep(cases, machine, mode, steps):
    """The text of a sweep of `cases`; `machine` is its block."""
    lines = [
        "version: 1", "name: exposed", f"mode: {mode}",
        "model: {inline: {family: gpt, layers: 4, hidden: 128, heads: 4, ffn: 512, vocab: 256, max_positions: 64}}",
        f"machine: {machine}", "data: {text: text.txt}", "profile: shardlab", "precision: fp32",
        "train: {seq_len: 64, global_batch_tokens: 4096, micro_batch: 32}",
        "layout: {dp: 2, collective_algorithm: ring}",
        f"measure: {{warmup: 1, steps: {steps}, repeat: 1, timeout: 4m}}", "include:"]
    lines += [f"  - {{name: {name}, {model}, {settings}}}" for name, model, settings in cases]
    return "\n".join(lines) + "\n"


def run(words, **options):
    """Runs a command to its end. Ends the study where it fails."""
    done = subprocess.run([str(w) for w in words], **options)
    if done.returncode not in (0, 4):  # 4: some case failed, which its row says
        sys.exit(f"failed with exit code {done.returncode}: {' '.join(str(w) for w in words)}")
    return done


class Link:
    """Two hosts joined at a rate, for as long as the block lasts."""

    def __init__(self, mbit):
        self.mbit, self.name = mbit, f"shardlab-exposed-{os.getpid()}"

    def __enter__(self):
        made = subprocess.run([HOSTS, "up", self.name, f"{self.mbit}mbit"], capture_output=True, text=True)
        if made.returncode == 77:
            print(made.stdout.strip())
            sys.exit(77)
        if made.returncode != 0:
            sys.exit(f"hosts.sh up failed: {made.stderr}")
        self.net = made.stdout.strip()
        return self

    def __exit__(self, *_):
        subprocess.run([HOSTS, "down", self.name], check=False)

    def on_both(self, shardlab, words, log, first_only=(), limit_s=900):
        """Runs `shardlab WORDS` on both hosts, each on the core of its number. Returns what the first one printed."""
        place = ["--world-size", "2", "--master-addr", f"10.77.{self.net}.1", "--master-port", str(PORT)]
        processes = []
        for host in (1, 0):
            verb = words(place + ["--rank", str(host), "--node", str(host)])
            command = ["ip", "netns", "exec", f"{self.name}-{host}", "taskset", "-c", str(host), shardlab, *verb]
            if host == 0:
                command += list(first_only)
            with open(f"{log}.{host}", "w") as errors:
                processes.append(subprocess.Popen([str(w) for w in command], stdout=subprocess.PIPE, stderr=errors, text=True))
        other, first = processes
        try:
            text, _ = first.communicate(timeout=limit_s)
            other.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            sys.exit(f"not done after {limit_s} s: see {log}.0 and {log}.1")
        if first.returncode not in (0, 4):
            sys.exit(f"failed with exit code {first.returncode}: see {log}.0 and {log}.1")
        return text


def measure_link(link, shardlab, folder):
    """Seconds of the collectives of two ranks by size, as rows of OUT/RATE/comm.csv."""
    file = folder / "comm.csv"
    if file.exists():
        return list(csv.DictReader(file.open()))
    rows = []
    for collectives, algorithm in ((COLLECTIVES, "ring"), ("broadcast", "direct"), ("all_reduce", "direct")):
        most = "64Ki" if collectives == "all_reduce" else "4Mi"
        text = link.on_both(shardlab, lambda place: [
            "comm", "--transport", "tcp", *place, "--format", "csv", "--timeout", "120", "--collectives", collectives, "--algorithm",
            algorithm, "-b", "1Ki", "-e", most, "--factor", "4", "--warmup", "1", "--iterations", "5"], folder / "comm.log")
        rows += list(csv.DictReader(text.splitlines()))
    with file.open("w") as out:
        writer = csv.DictWriter(out, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return rows


def machine_of(core, link_rows, mbit):
    """The machine of two nodes of one core: the calibrated core, with the link's collectives in place of those of its memory."""
    text = re.sub(r"(?m)^local: true$", "local: false", core)
    text = re.sub(r"(?m)^(cores|devices_per_node): .*$", r"\1: 1", text)
    text = re.sub(r"(?m)^nodes: .*$", "nodes: 2", text)
    text = re.sub(r"(?m)^inter_bandwidth: .*$", f"inter_bandwidth: {mbit * 125000}", text)
    between = re.compile(r"kernel: (all_reduce|reduce_scatter|all_gather|broadcast|all_to_all|p2p)\b")
    lines = [line for line in text.splitlines() if not between.search(line)]
    for row in link_rows:
        kernel = "p2p" if row["collective"] == "broadcast" else f"{row['collective']}.{row['algorithm']}"
        shape = row["bytes"] if kernel == "p2p" else f"{row['bytes']}, 2"
        seconds = row["in_place_time_s"] or row["time_s"]
        lines.append(f"    - {{kernel: {kernel}, shape: [{shape}], concurrency: 1, seconds: {seconds}, spread: 0, repeats: 5}}")
    return "\n".join(lines) + "\n"


def results(folder):
    file = folder / "results.csv"
    return {row["name"]: row for row in csv.DictReader(file.open())} if file.exists() else {}


def share(row, side):
    """Exposed communication as a share of the step, or nothing."""
    step, exposed = row.get(f"{side}_step_s", ""), row.get(f"{side}_exposed_comm_s", "")
    return float(exposed) / float(step) if step and exposed and float(step) > 0 else None


def kendall(pairs):
    """Kendall's tau-b of pairs (predicted, measured)."""
    concordant = discordant = ties_a = ties_b = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            if a == c or b == d:
                ties_a += a == c and b != d
                ties_b += b == d and a != c
            elif (a < c) == (b < d):
                concordant += 1
            else:
                discordant += 1
    all_a, all_b = concordant + discordant + ties_a, concordant + discordant + ties_b
    return (concordant - discordant) / (all_a * all_b) ** 0.5 if all_a and all_b else float("nan")


def study_rate(args, cases, mbit):
    """Predicts and measures the cases at one rate: their rows."""
    folder = args.out / str(mbit)
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("".join(f"line {i % 17} of a text that a small model can learn from\n" for i in range(400)))
    (folder / "measured.yaml").write_text(sweep(cases, "{local: true}", "measure", args.steps))
    with Link(mbit) as link:
        machine = folder / "machine.yaml"
        rows = measure_link(link, args.shardlab, folder)
        machine.write_text(machine_of((args.out / "core.yaml").read_text(), rows, mbit))
        (folder / "predicted.yaml").write_text(sweep(cases, "{file: machine.yaml}", "simulate", args.steps))
        run([args.shardlab, "run", folder / "predicted.yaml", "--out", folder / "predicted", "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        link.on_both(args.shardlab, lambda place: [
            "launch", *place, "run", folder / "measured.yaml", "--machine-file", args.out / "core.yaml", "--transport", "tcp", "--out",
            folder / "measured"], folder / "measured.log", first_only=["--resume"])
    predicted, measured = results(folder / "predicted"), results(folder / "measured")
    rows = []
    for name, _, _ in cases:
        p, m = predicted.get(name, {}), measured.get(name, {})
        rows.append({"mbit": mbit, "name": name, "predicted_step_s": p.get("predicted_step_s", ""), "measured_step_s": m.get("measured_step_s", ""),
                     "predicted_exposed_comm_s": p.get("predicted_exposed_comm_s", ""),
                     "measured_exposed_comm_s": m.get("measured_exposed_comm_s", ""), "predicted_share": share(p, "predicted"),
                     "measured_share": share(m, "measured"), "reason": p.get("reason", "") or m.get("reason", "")})
    return rows


def tell(rows, out):
    """Writes and prints the rows, and what they come to."""
    with (out / "rows.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(f"{'Mbit/s':>6}  {'case':<20} {'step: predicted':>15} {'measured':>9}   {'exposed: predicted':>18} {'measured':>9} {'error':>8}")
    known = []
    for r in rows:
        if r["predicted_share"] is None or r["measured_share"] is None:
            print(f"{r['mbit']:>6}  {r['name']:<20} {r['reason'] or 'no figures'}")
            continue
        known.append((r["predicted_share"], r["measured_share"]))
        print(f"{r['mbit']:>6}  {r['name']:<20} {float(r['predicted_step_s']):>13.4f} s {float(r['measured_step_s']):>7.4f} s   "
              f"{100 * r['predicted_share']:>16.1f} % {100 * r['measured_share']:>7.1f} % {100 * (r['predicted_share'] - r['measured_share']):>+7.1f}")
    if not known:
        sys.exit("no case was both predicted and measured")
    errors = [abs(p - m) for p, m in known]
    print(f"\n{len(known)} of {len(rows)} cases. Error of exposed communication, in percent of the step: mean {100 * sum(errors) / len(errors):.2f}, "
          f"worst {100 * max(errors):.2f}. Kendall's tau: {kendall(known):.3f}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shardlab", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rates", default="200,1000", help="of the link, Mbit/s")
    parser.add_argument("--only", default="", help="names of cases")
    parser.add_argument("--steps", type=int, default=40, help="measured, after one that warms up; a few leave the order of alike cases to chance")
    args = parser.parse_args()
    args.shardlab, args.out = args.shardlab.resolve(), args.out.resolve()
    if (os.cpu_count() or 1) < 2:
        sys.exit("two cores are needed, one for each host")
    names = [n for n in args.only.split(",") if n]
    unknown = set(names) - {c[0] for c in CASES}
    if unknown:
        sys.exit(f"no case is called {', '.join(sorted(unknown))}; one of: {', '.join(c[0] for c in CASES)}")
    cases = [c for c in CASES if not names or c[0] in names]
    args.out.mkdir(parents=True, exist_ok=True)
    core = args.out / "core.yaml"
    if not core.exists():
        run(["taskset", "-c", "0", args.shardlab, "calibrate", "-o", core], stdout=subprocess.DEVNULL)
    rows = []
    for mbit in (int(r) for r in args.rates.split(",")):
        rows += study_rate(args, cases, mbit)
    tell(rows, args.out)


if __name__ == "__main__":
    main()
