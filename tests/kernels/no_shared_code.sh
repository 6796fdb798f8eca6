#!/bin/sh
# no_shared_code.sh NM VARIANT OBJECT...: fails when an object file of a kernel variant holds a weak symbol, or a global one outside of the
# variant's namespace: the linker could give the whole program that copy, compiled for a processor that is not there.
nm=$1
variant=$2
shift 2
[ $# -gt 0 ] || { echo "no object files given"; exit 1; }
symbols=$("$nm" -C "$@") || exit 1
echo "$symbols" | grep -q " T .*::$variant::" || { echo "no function of $variant found: is the list of objects right?"; exit 1; }
shared=$(echo "$symbols" | grep -E " [WVuT] " | grep -vE " T shardlab::kernels::$variant::")
[ -z "$shared" ] || { echo "code that others could be linked to:"; echo "$shared"; exit 1; }
