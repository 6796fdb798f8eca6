#!/usr/bin/env bash
# Ranks under mpirun: every strategy trains to the bits, peaks and bytes of threads; `run` and `comm` join the job; the library is named.
#
#   mpi.sh openmpi|mpich TEST_WIRES SHARDLAB MACHINE.yaml
#
# Exit code 77: the MPI is not on this machine, which is said on stdout as "skipped: ...". `./dev wires` installs both.
set -euo pipefail
kind=$1 tests=$2 shardlab=$3 machine=$4

mpirun=mpirun.$kind
command -v "$mpirun" >/dev/null || mpirun=mpirun
case $kind in
  openmpi)
    is='Open MPI\|OpenRTE' package=openmpi-bin  # the latter under the name mpirun.openmpi
    # As root, with more processes than cores, one kind of message between processes of a node.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    launcher="$mpirun --oversubscribe --bind-to none --mca btl self,vader,tcp --mca btl_vader_single_copy_mechanism none" ;;
  mpich) is='HYDRA' package=mpich launcher=$mpirun ;;
  *) echo "mpi.sh openmpi|mpich ..., not $kind" >&2; exit 2 ;;
esac
command -v "$mpirun" >/dev/null || { echo "skipped: no $mpirun (Debian: $package)"; exit 77; }
"$mpirun" --version 2>/dev/null | grep -q "$is" || { echo "skipped: $mpirun is another MPI's (Debian: $package)"; exit 77; }
mpi() { $launcher "$@"; }
fail() { echo "failed: $*" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

every=40 counts="2 4"
[ -z "${SHARDLAB_THOROUGH:-}" ] || { every=5 counts="1 2 4"; }
for n in $counts; do
  SHARDLAB_CAMPAIGN="threads $n $every $work/threads" "$tests" '[.campaign]' >"$work/log" || { cat "$work/log" >&2; fail "threads"; }
  SHARDLAB_CAMPAIGN="mpi $n $every $work/mpi" mpi -n "$n" "$tests" '[.campaign]' >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; fail "$n processes"; }
  diff "$work/threads" "$work/mpi" >"$work/diff" || { head -c 2000 "$work/diff" >&2; fail "$n processes train otherwise than threads"; }
  echo "$(wc -l <"$work/mpi") cases over $n processes: the bits, peaks and bytes of threads"
done

for i in $(seq 200); do echo "line $((i % 17)) of a text that a small model can learn from"; done >"$work/text.txt"
cat >"$work/sweep.yaml" <<'SWEEP'
version: 1
name: mpi
mode: measure
model: {inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32}}
machine: {local: true}
data: {text: text.txt}
execution: {canonical: true}
train: {seq_len: 16, global_batch_tokens: 64}
layout: {dp: 2, tp: 2}
axes: {layout.zero: [0, 1]}
measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}
SWEEP
"$shardlab" run "$work/sweep.yaml" --machine-file "$machine" --out "$work/plain" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "run on threads"; }
# Each case has a job of its own.
"$shardlab" launch -n 2 run "$work/sweep.yaml" --machine-file "$machine" --transport mpi --launcher "$launcher" --out "$work/run" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; fail "launch"; }
# Columns that the wire may not change, by name.
columns() {
  awk -F, 'NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i }
    { print $column["status"], $column["measured_peak_bytes"], $column["measured_wire_bytes"], $column["loss_first"], $column["loss_last"] }' "$1/results.csv"
}
[ "$(columns "$work/run")" = "$(columns "$work/plain")" ] || { columns "$work/plain" >&2; columns "$work/run" >&2; fail "results over mpi are not those of threads"; }
# In one job there is one case; a second one is refused.
code=0
mpi -n 2 "$shardlab" run "$work/sweep.yaml" --machine-file "$machine" --transport mpi --out "$work/job" >"$work/log" 2>&1 || code=$?
columns "$work/job" | sed -n 2p >"$work/job.1"
columns "$work/plain" | sed -n 2p | diff - "$work/job.1" >&2 || { cat "$work/log" >&2; fail "run under mpirun, exit code $code"; }
grep -q 'a second case over mpi in one job' "$work/job/results.csv" || fail "a second case over mpi is not refused"
mpi -n 2 "$shardlab" comm --transport mpi --ranks 4 -b 64 -e 64Ki -f 32 --iterations 2 >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "comm under mpirun"; }
"$shardlab" comm --transport mpi -n 2 --launcher "$launcher" --collectives all_reduce -b 64 -e 64 --iterations 2 >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "comm with a launcher"; }
code=0
"$shardlab" run "$work/sweep.yaml" --machine-file "$machine" --transport mpi --launcher /no/mpirun --out "$work/none" >"$work/log" 2>&1 || code=$?
[ $code -eq 4 ] && grep -q '/no/mpirun cannot be started' "$work/none/results.csv" || { cat "$work/log" >&2; fail "a launcher that is not there is not named"; }
mpi -n 2 "$shardlab" doctor --format csv >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "doctor"; }
case $kind in
  openmpi) library='Open MPI' by='by Open MPI (OMPI_COMM_WORLD_RANK)' ;;
  mpich) library='MPICH' by='by PMI (PMI_RANK)' ;;
esac
[ "$(grep -c "^MPI,\"\?$library" "$work/log")" -eq 2 ] || { cat "$work/log" >&2; fail "doctor does not name the library"; }
for rank in 0 1; do
  grep -q "^place in a job,\"process $rank of 2, .*$by" "$work/log" || { cat "$work/log" >&2; fail "doctor does not show the place of process $rank"; }
done
echo "run, comm and doctor under $mpirun"
