// SPDX-License-Identifier: BSD-2-Clause
/*
 * System V shared memory. A round is five calls that succeed:
 *	shmget shmat shmctl(IPC_STAT) shmdt shmctl(IPC_RMID)
 * with sizes and flags that differ from round to round. After the rounds come,
 * once: a segment with a key, requested twice (the second time EEXIST), attached
 * at a chosen address, locked, queried by its index, and removed, in between calls
 * about all segments. Then one failing call of each kind, two of shmctl.
 *
 * facts: get, at, dt, ctl (the calls, see workload.h), and how many of each:
 *        shmget (= rounds + 3), shmat (= rounds + 2), shmdt (= rounds + 2),
 *        shmctl (= 2 * rounds + 8)
 */
#include "workload.h"
#include <sys/ipc.h>
#include <sys/shm.h>

static struct calls gets, ats, dts, ctls;

static int get(key_t key, size_t size, int flags)
{
	int id = shmget(key, size, flags);

	calls_add(&gets, id, 3, (unsigned long)(unsigned int)key, size, (unsigned long)flags);
	return id;
}

static char *at(int id, char *address, int flags)
{
	char *at = shmat(id, address, flags);

	calls_add(&ats, (long)at, 3, (unsigned long)(unsigned int)id, address,
		  (unsigned long)flags);
	return at;
}

static int dt(char *address)
{
	int result = shmdt(address);

	calls_add(&dts, result, 1, address);
	return result;
}

static int ctl(int id, int command, void *buffer)
{
	int result = shmctl(id, command, buffer);

	calls_add(&ctls, result, 3, (unsigned long)(unsigned int)id, (unsigned long)command,
		  buffer);
	return result;
}

static bool one_round(unsigned long i)
{
	static const int get_flags[] = { 0600, 0644, SHM_NORESERVE | 0600 };
	static const int at_flags[] = { 0, SHM_RDONLY };
	struct shmid_ds status;
	int id = get(IPC_PRIVATE, (i + 1) * PAGE, IPC_CREAT | get_flags[i % 3]);
	char *address;
	bool good;

	if (id < 0)
		return false;
	address = at(id, NULL, at_flags[i % 2]);
	good = address != (char *)-1;
	good &= ctl(id, IPC_STAT, &status) == 0 && status.shm_nattch == 1;
	good &= dt(address) == 0;
	good &= ctl(id, IPC_RMID, NULL) == 0;
	return good;
}

/* Commands without an id: the first argument is ignored, or is an index. */
static bool about_all(int id)
{
	struct shminfo limits;
	struct shm_info used;
	struct shmid_ds status;
	int index = id % 32768;
	bool good;

	good = ctl(id, IPC_INFO, &limits) >= 0;
	good &= ctl(id, SHM_INFO, &used) >= index && used.used_ids > 0;
	good &= ctl(index, SHM_STAT, &status) == id && status.shm_segsz == 7 * PAGE;
	return good;
}

static bool with_key(key_t key, char *address)
{
	int id = get(key, 7 * PAGE, IPC_CREAT | IPC_EXCL | 0640);
	bool good;

	if (id < 0)
		return false;
	good = get(key, 7 * PAGE, IPC_CREAT | IPC_EXCL | 0640) == -1 && errno == EEXIST;
	/* One byte too far: SHM_RND rounds the address down to the page. */
	good &= at(id, address + 1, SHM_RND | SHM_REMAP) == address;
	good &= ctl(id, SHM_LOCK, NULL) == 0;
	good &= about_all(id);
	good &= dt(address) == 0;
	good &= ctl(id, SHM_UNLOCK, NULL) == 0;
	good &= ctl(id, IPC_RMID, NULL) == 0;
	return good;
}

static bool failing(key_t key, char *address)
{
	bool good;

	good = get(key, PAGE, 0) == -1 && errno == ENOENT;
	good &= at(-1, NULL, 0) == (char *)-1 && errno == EINVAL;
	good &= dt(address + 1) == -1 && errno == EINVAL;
	good &= ctl(-1, IPC_STAT, NULL) == -1 && errno == EINVAL;
	/* The command has a bit that 64-bit kernels accept only from 32-bit processes. */
	good &= ctl(-1, IPC_STAT | 0x100, NULL) == -1 && errno == EINVAL;
	return good;
}

int main(int argc, char **argv)
{
	unsigned long rounds;
	/* Key that no other program and no other run of this program uses. */
	key_t key = 0x62700000 | (getpid() & 0xfffff);
	bool good = true;
	char *place;

	if (argc != 2)
		usage("ROUNDS");
	rounds = count(argv[1]);
	place = map_pages(7);
	ready();
	for (unsigned long i = 0; i < rounds; i++)
		good &= one_round(i);
	good &= with_key(key, place);
	good &= failing(key, place);
	if (!good)
		die("a call did not do what it should; see /proc/sys/kernel/shm* and ipcs -m");
	fact("key", "0x%x", key);
	fact("shmget", "%lu", gets.made);
	fact("shmat", "%lu", ats.made);
	fact("shmdt", "%lu", dts.made);
	fact("shmctl", "%lu", ctls.made);
	fact_calls("get", &gets);
	fact_calls("at", &ats);
	fact_calls("dt", &dts);
	fact_calls("ctl", &ctls);
	done();
	return 0;
}
