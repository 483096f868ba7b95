# Completes forebay. The program knows the words; this hands them over whole: readline would part them at `@`, `=` and `:` too.
_forebay() {
    local line=${COMP_LINE:0:COMP_POINT} words
    local IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local index=$((${#words[@]} - 1))
    # What readline takes for an earlier word stays on the line.
    local part=$2
    [[ $part == [@=:] ]] && part=
    local kept=${words[index]%"$part"}
    IFS=$'\013'
    COMPREPLY=($(
        _CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX="$index" _CLAP_COMPLETE_COMP_TYPE="$COMP_TYPE" COMPLETE=bash \
            forebay -- "${words[@]}" 2> /dev/null
    ))
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    if [[ ${COMPREPLY[0]-} == *[=/:] ]]; then
        compopt -o nospace 2> /dev/null
    fi
    return 0
}
complete -o bashdefault -o nosort -F _forebay forebay 2> /dev/null || complete -o bashdefault -F _forebay forebay
