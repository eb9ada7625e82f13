# Functions in every bash that `paddock run` starts (BASH_ENV): what files on PATH cannot stand in for.
# Programs are functions as well, so that a script that changes PATH (conda, activate) still calls the stand-ins.

[ -z "${PADDOCK_RUN_BASH_ENV:-}" ] || source "$PADDOCK_RUN_BASH_ENV"

__paddock_said() { echo "paddock: $*" >&2; }

for __paddock_file in "$PADDOCK_RUN_FOLDER"/programs/*; do
    __paddock_name=${__paddock_file##*/}
    eval "$__paddock_name() { { local - && set +x || :; } 2>/dev/null; \"$__paddock_file\" \"\$@\"; }"
done
unset __paddock_file __paddock_name

# Limits that this user may not raise stay as they are.
ulimit() {
    { local - && set +x || :; } 2>/dev/null
    builtin ulimit "$@" 2>/dev/null || __paddock_said "the limit stays as it is: ulimit $*"
}

# Environments of others are passed over where they are not: this Python serves.
command_not_found_handle() {
    case "$1:${2:-}" in
        conda:run | mamba:run | micromamba:run) ;; # a command stands behind it, and would not run
        conda:* | mamba:* | micromamba:* | module:* | ml:* | deactivate:*)
            __paddock_said "passed over, it is not on this machine: $*"
            return 0
            ;;
    esac
    echo "$1" >>"$PADDOCK_RUN_FOLDER/missing"
    echo "${BASH_SOURCE[1]:-bash}: line ${BASH_LINENO[0]}: $1: command not found" >&2
    return 127
}

# What would have been cloned or mounted is not there while planning.
if [ -n "${PADDOCK_PLAN:-}" ]; then
    cd() {
        { local - && set +x || :; } 2>/dev/null
        builtin cd "$@" 2>/dev/null || __paddock_said "passed over, there is no such folder: cd $*"
    }
fi

# Defined only for scripts that activate an environment: a file that `source` reads from inside a function sees other
# positional parameters.
if [ -n "$PADDOCK_RUN_ACTIVATES" ]; then
    source() {
        if [ -e "$1" ]; then builtin source "$@"; else __paddock_said "passed over, it is not on this machine: source $*"; fi
    }
    .() { source "$@"; }
fi

# A script that waits for something that never comes, before it has called Paddock, is stopped and named.
sleep() {
    { local - && set +x || :; } 2>/dev/null
    local place="line ${BASH_LINENO[0]} of ${BASH_SOURCE[1]:-bash}" notes=$PADDOCK_RUN_FOLDER missing= reason=
    if [ ! -d "$notes" ] || { [ -z "${PADDOCK_PLAN:-}" ] && [ -e "$PADDOCK_RUN_CALLED" ]; }; then
        command sleep "$@"
        return
    fi
    echo "$place" >>"$notes/waits"
    if [ -n "${PADDOCK_PLAN:-}" ]; then
        [ "$(wc -l <"$notes/waits")" -le 100 ] || reason="waits for ever: 100 times at $place, in one plan"
    else
        [ ! -e "$notes/missing" ] || missing=$(tail -n 1 "$notes/missing")
        if [ -n "$missing" ] && [ "$(grep -cxF "$missing" "$notes/missing")" -ge 3 ] &&
            [ "$(grep -cxF "$place" "$notes/waits")" -ge 3 ]; then
            reason="waits at $place for $missing, which is not on this machine"
        elif [ "$SECONDS" -ge 1800 ]; then
            reason="has waited for half an hour at $place, and called nothing of Paddock's"
        fi
    fi
    if [ -n "$reason" ]; then
        echo "$reason" >"$notes/stopped"
        kill -TERM $$
        exit 1
    fi
    [ -n "${PADDOCK_PLAN:-}" ] || command sleep "$@"
}
