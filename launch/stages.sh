#!/usr/bin/env bash
# Stages that run one after the other, each skipped where it is finished; sourced after env.sh, with
# OUT set. All that is started below has a mark in its environment, wherever it puts itself.

mark=STAGES=$$-$RANDOM$RANDOM
# shellcheck disable=SC2046,SC2317,SC2329     # guard and supervise call these
ask_left() { kill -TERM $(left "$mark"); }
# shellcheck disable=SC2317,SC2329
ask() { kill -TERM -- "-$1"; }
# shellcheck disable=SC2317,SC2329
end() { kill -INT -- "-$1"; }       # node.sh, asked before, ends the trainers
guard "$mark" "${ORPHAN_S:-60}" ask_left
export STAGES=${mark#*=}

# step NAME PRODUCT COMMAND...: run it, unless OUT/steps/NAME says that this very command has made
# PRODUCT, and its checksum is still the same; a signal lets it save and ends this script. PRODUCT:
# a file, or a pattern of which the last one by its numbers counts; $made is its name. With
# DRY_RUN=1 the command is printed instead.
step() {
    local name=$1 pattern=$2 done=$OUT/steps/$1 said status=0
    shift 2
    said=$(shown "$@")
    made=$(newest "$pattern")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        echo "$said"
        return
    fi
    if [ -e "$made" ] && [ "$(cat "$done" 2>/dev/null)" = "$said $(sha256sum <"$made")" ]; then
        echo "== $name: finished, $made"
        return
    fi
    rm -f "$done"
    trap 'end_all "$mark"' EXIT
    echo "== $name"
    supervise ask end "$@" || status=$?
    trap - TERM HUP INT
    [ -z "$asked" ] || exit $((128 + $(kill -l "$asked")))
    [ $status = 0 ] || exit $status
    made=$(newest "$pattern")
    need_file "$made" "$name"
    mkdir -p "$OUT/steps"
    echo "$said $(sha256sum <"$made")" >"$done.tmp"
    mv "$done.tmp" "$done"
}

newest() { compgen -G "$1" | sort -V | tail -n 1 || echo "$1"; }
