#!/bin/sh
# Checks that protos/ breaks no client of the main branch; on that branch, no client of what was pushed last.
set -eu
cd "$(dirname "$0")/.."
case $(git branch --show-current 2>/dev/null || true) in
    main) bases="origin/main main" ;;
    *) bases="main origin/main" ;;
esac
for base in $bases; do
    if git cat-file -e "$base:protos" 2>/dev/null; then
        against=$(mktemp -d)
        trap 'rm -rf "$against"' EXIT
        git archive "$base" protos buf.yaml | tar -x -C "$against"
        tools/node_modules/.bin/buf breaking --against "$against"
        exit
    fi
done
echo "the schema is not compared with an earlier one: there is no main branch with protos/ here"
