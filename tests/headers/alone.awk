# Writes sources that prove each header to compile alone, many headers a source:
#
#   awk -v out=FOLDER -f tests/headers/alone.awk HEADER...
#
# A header is written out with the project's headers that it includes, in a namespace of its own, so that it sees nothing that another
# header declares; macros are undefined behind it. Headers of others (<vector>) are included before, once a source. Therefore the headers
# of a source are in an order in which each includes all that those before it include, and so sees nothing that it does not ask for.
BEGIN {
  for (i = 1; i < ARGC; i++) project[ARGV[i]] = 1
  for (i = 1; i < ARGC; i++) read_header(ARGV[i])
  for (i = 1; i < ARGC; i++) gather(ARGV[i], ARGV[i])
  total = sort_by_size()
  for (i = 1; i <= total; i++) append(sorted[i])
  for (s = 1; s <= sources; s++) write_source(s)
}

function read_header(header, line, n) {
  while ((getline line < header) > 0) {
    text[header, ++n] = line
    if (line ~ /^[ \t]*#[ \t]*include[ \t]*["<]/) {
      sub(/^[^"<]*["<]/, "", line)
      sub(/[">].*/, "", line)
      included[header, n] = line
    } else if (line ~ /^[ \t]*#[ \t]*define[ \t]/) {
      sub(/^[ \t]*#[ \t]*define[ \t]+/, "", line)
      sub(/[^A-Za-z0-9_].*/, "", line)
      macros[header] = macros[header] " " line
    }
  }
  close(header)
  lines[header] = n
}

# What `root` includes of others, itself or through the project's headers: others[root, 1 .. size[root]].
function gather(root, header, n, name) {
  if ((root, header) in gathered) return
  gathered[root, header] = 1
  weight[root] += lines[header]
  for (n = 1; n <= lines[header]; n++) {
    if (!((header, n) in included)) continue
    name = included[header, n]
    if (name in project) gather(root, name)
    else if (!((root, name) in asks)) { asks[root, name] = 1; others[root, ++size[root]] = name }
  }
}

function sort_by_size(i, j, header) {
  for (i = 1; i < ARGC; i++) {
    header = ARGV[i]
    for (j = i - 1; j >= 1 && before(header, sorted[j]); j--) sorted[j + 1] = sorted[j]
    sorted[j + 1] = header
  }
  return ARGC - 1
}

function before(header, other) {
  return size[header] != size[other] ? size[header] + 0 < size[other] + 0 : weight[header] < weight[other]
}

function asks_for_all(header, other, i) {
  for (i = 1; i <= size[other]; i++) if (!((header, others[other, i]) in asks)) return 0
  return 1
}

# To the source whose last header this one includes, else to the one whose last header asks for most of what this one asks for.
function append(header, s, best, worth, most) {
  for (s = 1; s <= sources; s++) {
    if (!asks_for_all(header, last[s])) continue
    worth = ((header, last[s]) in gathered) ? 1000 + weight[last[s]] : size[last[s]]
    if (!best || worth > most) { best = s; most = worth }
  }
  if (!best) best = ++sources
  last[best] = header
  members[best, ++count[best]] = header
}

function write_source(s, file, i, j, header, name, names, n) {
  file = out "/alone_" s ".cpp"
  undefine = ""
  for (i = 1; i <= count[s]; i++) {
    header = members[s, i]
    for (j = 1; j <= size[header]; j++) {
      name = others[header, j]
      if ((s, name) in written) continue
      written[s, name] = 1
      print "#if __has_include(<" name ">)\n#include <" name ">\n#endif" > file
    }
    # A header that includes the one before it sees nothing new of it, and goes on in its namespace.
    if (i == 1 || !((header, members[s, i - 1]) in gathered)) {
      n = split(undefine, names, " ")
      for (j = 1; j <= n; j++) print "#undef " names[j] > file
      undefine = ""
      space = i
    }
    print "namespace alone_" space " {" > file
    write_header(file, s SUBSEP space, header)
    print "}" > file
  }
  close(file)
}

function write_header(file, place, header, n, line) {
  if ((place, header) in placed) return
  placed[place, header] = 1
  undefine = undefine macros[header]
  print "#line 1 \"" header "\"" > file
  for (n = 1; n <= lines[header]; n++) {
    line = text[header, n]
    if ((header, n) in included) {
      line = ""
      if (included[header, n] in project) {
        write_header(file, place, included[header, n])
        line = "#line " n " \"" header "\"\n"
      }
    } else if (line ~ /^#pragma once/) line = ""
    # From the outermost namespace on, which here is the header's own.
    while (match(line, /(^|[^A-Za-z0-9_>])::shardlab/)) {
      n_kept = substr(line, RSTART, 1) == ":" ? RSTART - 1 : RSTART
      line = substr(line, 1, n_kept) substr(line, n_kept + 3)
    }
    print line > file
  }
}
