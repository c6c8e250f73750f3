// SPDX-License-Identifier: BSD-2-Clause
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.lang.reflect.Field;

/*
 * java Depth COUNT DEPTH: malloc and free of 64 bytes, COUNT times, below DEPTH calls of one method. Prints the
 * nanoseconds of a pair, of the thread's own time. depth.c and depth.py do the same.
 */
@SuppressWarnings({"removal", "deprecation"})
public class Depth {
	static final ThreadMXBean threads = ManagementFactory.getThreadMXBean();
	static sun.misc.Unsafe unsafe;

	static long descend(int depth, int operations) {
		if (depth > 0)
			return descend(depth - 1, operations);
		long begin = threads.getCurrentThreadCpuTime();
		for (int i = 0; i < operations; i++)
			unsafe.freeMemory(unsafe.allocateMemory(64));
		return threads.getCurrentThreadCpuTime() - begin;
	}

	public static void main(String[] args) throws Exception {
		int count = Integer.parseInt(args[0]), deep = Integer.parseInt(args[1]);
		Field field = sun.misc.Unsafe.class.getDeclaredField("theUnsafe");

		field.setAccessible(true);
		unsafe = (sun.misc.Unsafe) field.get(null);
		/* Warm up until descend() is compiled; with -Xint it never is. */
		for (int i = 0; i < 20000; i++)
			descend(deep, 1);
		System.out.println("ready " + ProcessHandle.current().pid());
		System.in.read();
		/* The first stacks are walked while memleak still looks for the virtual machine. */
		descend(deep, 1009);
		Thread.sleep(500);
		System.out.printf("done ns=%.1f%n", (double) descend(deep, count) / count);
		System.in.read();
	}
}
