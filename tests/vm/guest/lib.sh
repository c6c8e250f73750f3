# For the commands of a guest: . /vmrun/lib.sh
# shellcheck shell=sh

# zram_swap SIZE: swap on compressed memory, read back one page at a time, so
# that each page swapped in is one fault.
zram_swap() {
	swapoff /dev/zram0 2>/dev/null
	echo 1 >/sys/block/zram0/reset
	echo "$1" >/sys/block/zram0/disksize &&
		mkswap /dev/zram0 >/dev/null &&
		swapon /dev/zram0 &&
		echo 0 >/proc/sys/vm/page-cluster
}

# memcg NAME [max=8M] [high=..] [swap.max=0]...: a memory cgroup with limits.
memcg() {
	_group=/sys/fs/cgroup/$1
	shift
	mkdir -p "$_group" || return
	for _limit; do
		echo "${_limit#*=}" >"$_group/memory.${_limit%%=*}" || return
	done
}

# incg NAME COMMAND...: run a command in the cgroup NAME.
incg() {
	_group=/sys/fs/cgroup/$1
	shift
	# shellcheck disable=SC2016 # for the inner shell
	sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$_group" "$@"
}

# drop_caches: write out and forget page cache, dentries and inodes.
drop_caches() {
	sync
	echo 3 >/proc/sys/vm/drop_caches
}

# hugepages N: reserve exactly N huge pages, or fail.
hugepages() {
	echo "$1" >/proc/sys/vm/nr_hugepages
	_got=$(cat /proc/sys/vm/nr_hugepages)
	[ "$_got" -eq "$1" ] || {
		echo "hugepages: $_got of $1; give the guest more --mem" >&2
		return 1
	}
}
