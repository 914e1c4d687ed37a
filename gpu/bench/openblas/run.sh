#!/bin/sh
# Compares the matrix product of gpu/cpu with OpenBLAS on one core. Skips, with the reason, where a C compiler or the
# library is absent. OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE would keep OpenBLAS from choosing its best kernel.
set -eu
cd "$(dirname "$0")"
if ! command -v "${CC:-cc}" >/dev/null; then
	echo "openblas: skipped: no C compiler"
	exit 0
fi
if ! echo 'int main(void){return 0;}' | "${CC:-cc}" -x c - -lopenblas -o /dev/null 2>/dev/null; then
	echo "openblas: skipped: no OpenBLAS library (Debian: libopenblas-dev)"
	exit 0
fi
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
CGO_ENABLED=1 exec go test -count=1 -tags openblas -v -bench . "$@" .
