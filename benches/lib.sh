# Library for the benchmarks of this folder: . benches/lib.sh
# shellcheck shell=bash disable=SC2154
#
# A benchmark sets `rounds` and `variants`, of which "none" has no tracer, and defines
#	program_of VARIANT     sets `run`, a command that speaks the protocol of tests/workload and
#	                       states the fact ns
#	tracer VARIANT PID     becomes the tracer; a variant of `untraced` has none
#	is_live VARIANT        returns 0 when the tracer, process $tracer with its output in "$work/log",
#	                       traces
# and then calls compare.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ "$(id -u)" -eq 0 ] || { echo "bench: tracing needs root; run: sudo make bench" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkfifo "$work/in" "$work/out"

# build SOURCE: compiles a program with the frames that a stack is to show.
build() {
	${CC:-cc} -O2 -pthread -fno-omit-frame-pointer -fno-shrink-wrap -fno-builtin -o "$work/$(basename "$1" .c)" "$1"
}

# Variants without a tracer: the program alone, or run by a peer.
untraced=" none valgrind heaptrack "

# hear WORD: reads lines of the program up to one that begins with WORD. A peer that runs the program may print other
# lines.
hear() {
	while read -r line <&4; do
		[ "${line%% *}" != "$1" ] || return 0
	done
	echo "bench: the program ended before it said: $1" >&2
	return 1
}

# says TEXT: whether the tracer has printed TEXT.
says() { grep -q "$1" "$work/log"; }

# sleeps: whether the tracer sleeps, as it does when it traces; for tracers whose output stays in a buffer until they
# end.
sleeps() {
	local clock_nanosleep=230
	grep -q "^$clock_nanosleep " "/proc/$tracer/syscall"
}

# Prints the nanoseconds that the program states under a variant.
measure() {
	local variant=$1 pid tracer='' line run
	program_of "$variant"
	"${run[@]}" <"$work/in" >"$work/out" 2>/dev/null &
	pid=$!
	exec 3>"$work/in" 4<"$work/out"
	hear ready
	: >"$work/log"
	if [[ $untraced != *" $variant "* ]]; then
		tracer "$variant" "$pid" >>"$work/log" 2>&1 3>&- 4<&- &
		tracer=$!
		until is_live "$variant"; do
			kill -0 "$tracer" 2>/dev/null || { cat "$work/log" >&2; kill "$pid"; exit 1; }
			sleep 0.05
		done
		# Peers say that they attach, not that they have.
		[[ $variant = ${ours%% *}* || $variant = floor* ]] || sleep 3
	fi
	echo >&3
	hear "done"
	exec 3>&- 4<&-
	wait "$pid" || true
	if [ -n "$tracer" ]; then
		kill -INT "$tracer" 2>/dev/null || true
		wait "$tracer" 2>/dev/null || true
	fi
	line=${line#*ns=}
	echo "${line%% *}"
}

# median_of VARIANT: prints the median of what compare has measured.
median_of() { grep "^$1	" "$work/results" | cut -f 2 | median; }

# median: prints the median of the numbers on stdin.
median() { sort -n | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }

# Runs all variants in turn, so that other load on the machine hits all of them. Each run writes a line to
# "$work/results": the variant, a tab, and what measure prints.
measure_all() {
	local round variant stated
	for ((round = 1; round <= rounds; round++)); do
		for variant in "${variants[@]}"; do
			stated=$(measure "$variant")
			echo "$variant	$stated"
		done
	done >"$work/results"
}

# compare OURS WHAT UNIT: measures all variants, and prints the medians of what each adds, with the range, and the
# ratio to that of OURS.
compare() {
	local ours=$1 what=$2 unit=$3
	measure_all
	echo "$(date +%F), $(uname -r), $(nproc) CPUs, $rounds rounds of $what; ns added to one $unit"
	echo
	echo "| variant | median | range | to $ours |"
	echo "|---|---|---|---|"
	sort -t '	' -k1,1 -k2,2n "$work/results" | awk -F '\t' -v ours="$ours" '
		function median(name) { return value[name, int((count[name] + 1) / 2)] }
		{ value[$1, ++count[$1]] = $2; order[$1] = $1 }
		END {
			base = median("none"); own = median(ours) - base
			for (name in order)
				if (name != "none")
					printf "| %s | %.0f | %.0f to %.0f | %.2f |\n", name, median(name) - base,
						value[name, 1] - base, value[name, count[name]] - base, (median(name) - base) / own
			printf "| none | %.0f in all | %.0f to %.0f | |\n", base, value["none", 1], value["none", count["none"]]
		}' | sort
}
