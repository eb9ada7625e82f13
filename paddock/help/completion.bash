# Completion of paddock for bash:  eval "$(paddock completion bash)"
_paddock() {
    # bash cuts words at = and :, and keys hold both: the words are read from the line itself.
    local line=${COMP_LINE:0:COMP_POINT} current word kept=
    local -a words
    read -r -a words <<<"$line"
    case $line in *[[:space:]]) words+=("") ;; esac
    current=${words[${#words[@]}-1]}
    case $COMP_WORDBREAKS in *:*) case $current in *:*) kept=${current%"${current##*:}"} ;; esac ;; esac
    case $COMP_WORDBREAKS in
        *=*) case $current in *=*)
            word=${current%"${current##*=}"}
            [ ${#word} -gt ${#kept} ] && kept=$word ;;
        esac ;;
    esac
    COMPREPLY=()
    while IFS= read -r word; do
        [ -n "$word" ] || continue
        case $word in *[=./]) ;; *) word="$word " ;; esac
        word=${word#"$kept"}
        case $word in *' '?*) word="$(printf '%q' "${word% }")${word:${#word}-1:1}" ;; esac
        COMPREPLY+=("$word")
    done < <("${words[0]}" completion --words "${words[@]:1}" 2>/dev/null)
}
complete -o nospace -F _paddock paddock
