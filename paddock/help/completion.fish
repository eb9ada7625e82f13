# Completion of paddock for fish:  paddock completion fish | source
function __paddock_words
    set -l words (commandline -opc)
    $words[1] completion --words $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c paddock -f -a '(__paddock_words)'
