#compdef paddock
# Completion of paddock for zsh, after compinit:  eval "$(paddock completion zsh)"
_paddock() {
    local -a asked ends goes
    local word
    asked=("${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}")
    for word in "${(@f)$("${(Q)words[1]}" completion --words "${asked[@]}" 2>/dev/null)}"; do
        case $word in
            '') ;;
            *[=./]) goes+=("$word") ;;
            *) ends+=("$word") ;;
        esac
    done
    (( $#goes )) && compadd -S '' -- "${goes[@]}"
    (( $#ends )) && compadd -- "${ends[@]}"
    return $(( $#goes + $#ends == 0 ))
}
compdef _paddock paddock
