#!/usr/bin/env bash
# Fails where include/warpfs.h, or a program that needs only it, does not compile without a warning, in C and, where
# there is a compiler for it, in C++.
set -euo pipefail
cd "$(dirname "$0")/.."

strict=(-Wall -Wextra -Werror -pedantic -fsyntax-only -I include)
for standard in c99 c11 gnu17; do
    for program in mount-scripts/examples/*.c tests/header/*.c; do
        "${CC:-cc}" -std="$standard" "${strict[@]}" "$program"
    done
done
languages="C"
if command -v "${CXX:-c++}" >/dev/null 2>&1; then
    for standard in c++98 c++11 c++17; do
        printf '#include "warpfs.h"\n#include <cerrno>\nint main() { return 0; }\n' |
            "${CXX:-c++}" -std="$standard" "${strict[@]}" -x c++ -
    done
    languages="C and C++"
fi
echo "check: the header compiles in $languages"
