#!/usr/bin/env bash
# Several hosts on one machine: network namespaces joined by a link of a set rate, and collectives measured across it.
#
#   hosts.sh test SHARDLAB MACHINE.yaml   trains and measures across two hosts, cuts the link, takes everything away again
#   hosts.sh figures SHARDLAB MACHINE.yaml   bus bandwidths beside the shape, and training across: on a machine that does nothing else
#   hosts.sh up NAME RATE         two hosts NAME-0 (10.77.N.1) and NAME-1 (10.77.N.2), joined at RATE ("200mbit"); prints N
#   hosts.sh down NAME            takes them away, with what runs in them
#
# A host is a network namespace, entered by `ip netns exec NAME-0 COMMAND`. Exit code 77: this machine does not give the right to
# build one, which is said on stdout as "skipped: ...".
set -euo pipefail

skip() { echo "skipped: $*"; exit 77; }
fail() { echo "failed: $*" >&2; exit 1; }

# The token bucket shapes each direction by itself. Frames of 9000 bytes, so that headers take under a hundredth of the rate. The bucket holds what a
# link of 1 Gbit/s sends in two milliseconds: with less, a core that looks at it late loses rate that it cannot make up. TCP takes
# Reno's window: with BBR, which some systems begin with, two ranks reach 90 to 99 % of 200 Mbit/s, and always 99 % with Reno. Each host
# receives on one core: a sender that moves from core to core would have its frames overtake each other.
up() {
  local name=$1 rate=$2 net=$(($$ % 250 + 1)) host
  command -v ip >/dev/null && command -v tc >/dev/null || skip "no ip and tc (Debian: iproute2)"
  ip netns add "$name-0" 2>/dev/null || skip "no right to make network namespaces (CAP_SYS_ADMIN)"
  ip netns add "$name-1"
  ip -n "$name-0" link add wire mtu 9000 type veth peer name wire netns "$name-1" 2>/dev/null || { down "$name"; skip "no veth devices in this kernel"; }
  for host in 0 1; do
    ip -n "$name-$host" link set lo up
    ip -n "$name-$host" addr add "10.77.$net.$((host + 1))/24" dev wire
    ip -n "$name-$host" link set wire mtu 9000 up
    ip netns exec "$name-$host" sh -c "echo $((host + 1)) >/sys/class/net/wire/queues/rx-0/rps_cpus" 2>/dev/null || true  # needs a second core
    ip netns exec "$name-$host" sysctl -q -w net.ipv4.tcp_congestion_control=reno >/dev/null 2>&1 || true
    ip netns exec "$name-$host" tc qdisc add dev wire root tbf rate "$rate" burst 256kb latency 400ms 2>/dev/null ||
      { down "$name"; skip "no token bucket in this kernel (sch_tbf)"; }
  done
  echo "$net"
}

down() {
  local host process
  for host in 0 1; do
    for process in $(ip netns pids "$1-$host" 2>/dev/null); do kill -9 "$process" 2>/dev/null || true; done
    ip netns del "$1-$host" 2>/dev/null || true
  done
}

# measure NAME NET OUT ARGUMENTS...: one process on each host; the first writes the table as CSV.
measure() {
  local name=$1 net=$2 out=$3 host processes=() code=0; shift 3
  for host in 1 0; do
    ip netns exec "$name-$host" "$shardlab" comm --transport tcp --rank $host --world-size 2 --node $host --master-addr "10.77.$net.1" \
      --master-port 29500 --format csv --timeout 60 "$@" >"$out.$host" 2>"$out.err.$host" &
    processes+=($!)
  done
  for host in 0 1; do wait "${processes[$host]}" || code=$?; done
  [ "$code" -eq 0 ] || { cat "$out".err.* >&2; fail "comm $* ended with exit code $code"; }
}

# check OUT COLLECTIVE RATE FACTOR: says each line's bus bandwidth beside FACTOR times RATE bytes/s. No element was wrong, and nothing is
# faster than the link: what goes faster has not gone over it. Slower is the machine's affair, which may be busy.
check() {
  awk -F, -v collective="$2" -v rate="$3" -v factor="$4" '
    NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i; next }
    $1 == collective {
      split("busbw in_place_busbw", names, " ")
      for (k in names) {
        value = $(column[names[k]])
        if (value == "") continue
        ++lines
        off = value / (rate * factor) - 1
        printf "%s %s, %d bytes: %.4g bytes/s, %+.2f %% of the shape\n", $1, $2, $3, value, 100 * off
        if (off > 0.05) bad = 1
      }
      if ($(column["wrong"]) > 0 || $(column["in_place_wrong"]) > 0) { print "wrong elements"; bad = 1 }
    }
    END { if (lines == 0) print "no lines of " collective; exit bad || lines == 0 }' "$1.0" || fail "$2 does not go over the link, or is wrong"
}

# What must hold of a link of R bytes/s each way between two nodes of two ranks. Two ranks, one a node: every collective sends
# (n - 1) / n of its bytes once (an all-reduce twice), so that its bus bandwidth is R. Four ranks, two a node: a ring's bus bandwidth is
# that of its slowest link, R; in two levels each rank has its own way across and half as much to send, 1.5 R.
across() {
  local bits=$1 kib=$2 iterations=$3 net=$4 bytes=$(($1 * 125000)) size=$(($1 * $2))Ki
  echo "$bits Mbit/s, $size"
  measure "$name" "$net" "$work/two" --collectives all_reduce,all_gather -b "$size" -e "$size" --iterations "$iterations" --warmup 1
  check "$work/two" all_reduce "$bytes" 1
  check "$work/two" all_gather "$bytes" 1
  measure "$name" "$net" "$work/ring" --ranks 4 --collectives all_reduce --algorithm ring -b "$size" -e "$size" --iterations "$iterations" --warmup 1
  check "$work/ring" all_reduce "$bytes" 1
  measure "$name" "$net" "$work/levels" --ranks 4 --collectives all_reduce --algorithm hierarchical -b "$size" -e "$size" --iterations "$iterations" --warmup 1
  check "$work/levels" all_reduce "$bytes" 1.5
}

# A link that goes down while two hosts train: both end by themselves, and the case says which process is lost.
cut() {
  local net=$1 host code=0 processes=()
  for host in $(seq 200); do echo "line $((host % 17)) of a text that a small model can learn from"; done >"$work/text.txt"
  cat >"$work/sweep.yaml" <<'SWEEP'
version: 1
name: cut
mode: measure
model: {inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32}}
machine: {local: true}
data: {text: text.txt}
train: {seq_len: 16, global_batch_tokens: 64}
layout: {dp: 2}
measure: {warmup: 1000000, steps: 2, repeat: 1, timeout: 60s}
SWEEP
  for host in 1 0; do
    ip netns exec "$name-$host" timeout 90 "$shardlab" launch --rank $host --world-size 2 --node $host --master-addr "10.77.$net.1" --master-port 29500 \
      run "$work/sweep.yaml" --machine-file "$machine" --transport tcp --set checkpoint.save_every=1 --out "$work/cut" >"$work/cut.$host" 2>&1 &
    processes+=($!)
  done
  for host in $(seq 600); do
    ! compgen -G "$work/cut/*/checkpoints/step-00000003.manifest" >/dev/null || break
    sleep 0.05
  done
  ip -n "$name-1" link set wire down
  wait "${processes[1]}" || code=$?
  [ $code -eq 4 ] || { cat "$work"/cut.* >&2; fail "a run whose link is cut ends with exit code $code"; }
  code=0
  wait "${processes[0]}" || code=$?
  [ $code -ne 0 ] && [ $code -ne 124 ] || fail "the host behind a cut link ends with exit code $code"
  grep -q 'process 1 of 2 is out of reach: rank 1 is waited for ' "$work/cut/results.csv" || { cat "$work/cut/results.csv" >&2; fail "nobody says which process is lost"; }
  echo "a link that goes down: both hosts end, and the process that is lost is said"
}

# Data parallelism across the link, measured: reduced behind backward and after it, by 8 bits, and by a parameter server on both hosts.
trained() {
  local bits=$1 net=$2 host processes=() code=0
  for host in $(seq 200); do echo "line $((host % 17)) of a text that a small model can learn from"; done >"$work/text.txt"
  cat >"$work/train.yaml" <<'SWEEP'
version: 1
name: train
mode: measure
model: {inline: {family: gpt, layers: 4, hidden: 128, heads: 4, ffn: 512, vocab: 256, max_positions: 64}}
machine: {local: true}
data: {text: text.txt}
train: {seq_len: 64, global_batch_tokens: 4096, micro_batch: 32}
layout: {dp: 2, bucket_bytes: 512Ki}
measure: {warmup: 2, steps: 6, repeat: 1, timeout: 5m}
include:
  - {name: overlapped}
  - {name: serial, overlap: false}
  - {name: int8, compression.kind: int8}
  - {name: served, parameter_server.servers: 2}
SWEEP
  for host in 1 0; do
    ip netns exec "$name-$host" timeout 300 "$shardlab" launch --rank $host --world-size 2 --node $host --master-addr "10.77.$net.1" --master-port 29500 \
      run "$work/train.yaml" --machine-file "$machine" --transport tcp --out "$work/train.$bits" >"$work/train.$bits.$host" 2>&1 &
    processes+=($!)
  done
  for host in 0 1; do wait "${processes[$host]}" || code=$?; done
  [ "$code" -eq 0 ] || { cat "$work/train.$bits".* >&2; fail "training across hosts ends with exit code $code"; }
  awk -F, -v bits="$bits" 'NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i; next }
    { printf "%s Mbit/s, %s: step %.4g s, exposed communication %.4g s, %d bytes on the wire\n", bits, $column["name"], $column["measured_step_s"],
        $column["measured_exposed_comm_s"], $column["measured_wire_bytes"] }' "$work/train.$bits/results.csv"
}

prepare() {
  shardlab=$1 name=shardlab-$$ work=$(mktemp -d)
  trap 'down "'"$name"'"; rm -rf "'"$work"'"' EXIT
}

run_test() {
  machine=$2
  prepare "$1"
  local net
  net=$(up "$name" 1000mbit) || { local code=$?; echo "$net"; exit $code; }
  across 1000 8 2 "$net"
  cut "$net"
  down "$name"
  ! ip netns list | grep -q "^$name-" || fail "a host is left behind"
}

figures() {
  machine=$2
  prepare "$1"
  local net bits
  for bits in 200 1000; do
    net=$(up "$name" "${bits}mbit") || { local code=$?; echo "$net"; exit $code; }
    across "$bits" 128 4 "$net"
    trained "$bits" "$net"
    down "$name"
  done
}

case "${1:-}" in
  test) run_test "$2" "$3" ;;
  figures) figures "$2" "$3" ;;
  up) up "$2" "$3" ;;
  down) down "$2" ;;
  *) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
