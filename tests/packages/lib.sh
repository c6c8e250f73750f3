# Functions that make and use clean roots of Debian, for the tests of packages. This file is sourced from the
# project's folder. It needs `cache` (the folder that roots are kept in), die() and scripts/suites.

# Runs a command in a root, with this kernel's file systems, for WITHIN_SECONDS (600) at most. The mounts end
# with the command.
within() {
	local root=$1
	shift
	# shellcheck disable=SC2016 # the inner shell's
	timeout "${WITHIN_SECONDS:-600}" unshare --mount sh -euc 'root=$1; shift
		mkdir -p "$root/proc" "$root/sys" "$root/dev"
		for folder in proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
		exec env -i HOME=/root TERM=dumb LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"' - "$root" "$@"
}

# make_root SUITE NAME PACKAGE,PACKAGE: makes a root of Debian's SUITE with these packages, in roots/NAME.tar
# of the cache.
make_root() {
	local suite=$1 name=$2 packages=$3 mirror
	mkdir -p "$cache/roots"
	if [ ! -s "$cache/roots/$name.tar" ] || [ "$(cat "$cache/roots/$name.packages")" != "$packages" ]; then
		mirror=${MEMTOOLS_MIRROR:-$(own_mirror '[a-z]+')}
		[ -n "$mirror" ] || die "apt of this machine lists no debian; name a mirror in MEMTOOLS_MIRROR"
		echo "$0: making a root of $suite" >&2
		# The mirror may be a snapshot, whose lists are as old as the snapshot.
		mmdebstrap --quiet --variant=minbase --include="$packages" --aptopt='Acquire::Check-Valid-Until "false"' \
			"$suite" "$cache/roots/$name.new" "$mirror" --format=tar || die "$suite: cannot make a root"
		echo "$packages" >"$cache/roots/$name.packages"
		mv "$cache/roots/$name.new" "$cache/roots/$name.tar"
	fi
}
