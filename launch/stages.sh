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

# CPU seconds of all that this shell has waited for and that waited for; /proc counts hundredths.
cpu_seconds() { awk '{ sub(/.*\) /, ""); print int(($14 + $15) / 100) }' /proc/$$/stat; }

# stage NAME COMMAND...: run it; a signal lets it save and ends this script.
stage() {
    local name=$1 status=0 began=$SECONDS used
    used=$(cpu_seconds)
    shift
    trap 'end_all "$mark"' EXIT
    echo "== $name"
    supervise ask end "$@" || status=$?
    trap - TERM HUP INT
    case ${asked:-} in
    '') ;;
    INT) exit 130 ;;
    *) exit 143 ;;
    esac
    [ $status = 0 ] || exit $status
    used=$(($(cpu_seconds) - used))
    printf '%s\t%s\t%s\n' "$name" $((SECONDS - began)) $used >>"$OUT/stages.tsv"
}

# step NAME PRODUCT COMMAND...: stage, unless OUT/steps/NAME says that this very command has made
# PRODUCT, and its checksum is still the same. PRODUCT: a file, or a pattern of which the last one
# by its numbers counts; $made is its name. With DRY_RUN=1 the command is printed instead.
step() {
    local name=$1 pattern=$2 done=$OUT/steps/$1 said
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
    stage "$name" "$@"
    made=$(newest "$pattern")
    need_file "$made" "$name"
    mkdir -p "$OUT/steps"
    echo "$said $(sha256sum <"$made")" >"$done.tmp"
    mv "$done.tmp" "$done"
}

newest() { compgen -G "$1" | sort -V | tail -n 1 || echo "$1"; }

# the seconds of each stage, over all starts
stage_seconds() {
    awk -F '\t' '!($1 in sum) { names[n++] = $1 }
        { sum[$1] += $2; cpu[$1] += $3 }
        END {
            for (i = 0; i < n; i++)
                text = text ", " names[i] " " sum[names[i]] " (" cpu[names[i]] ")"
            print "seconds    " substr(text, 3) "; in brackets those of the CPUs"
        }' "$OUT/stages.tsv"
}
