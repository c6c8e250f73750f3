// SPDX-License-Identifier: BSD-2-Clause
import java.io.PrintWriter;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.lang.reflect.Field;
import java.security.AccessController;
import java.security.PrivilegedAction;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.IntStream;

/*
 * java Frames FILE COUNT [PAGES]: three threads allocate COUNT blocks each, from chains of calls of many
 * kinds. The blocks have 1016 bytes, a size that Java itself does not allocate. FILE gets a line for each
 * block: its address and the frames that StackWalker finds, from the innermost on, between tabs. Each
 * frame is a method and, if it is known, its line. Then other threads have PAGES page faults, or more: in
 * their bodies, in copies, and on their stacks.
 */
@SuppressWarnings({"removal", "deprecation"})
public class Frames {
	static final long BYTES = 1016;
	static final sun.misc.Unsafe UNSAFE;
	static final MethodHandle HANDLE;
	static final StackWalker WALKER =
		StackWalker.getInstance(Set.of(StackWalker.Option.SHOW_HIDDEN_FRAMES));

	static {
		try {
			Field field = sun.misc.Unsafe.class.getDeclaredField("theUnsafe");
			field.setAccessible(true);
			UNSAFE = (sun.misc.Unsafe) field.get(null);
			HANDLE = MethodHandles.lookup().findStatic(
				Frames.class, "take", MethodType.methodType(void.class));
		} catch (ReflectiveOperationException e) {
			throw new ExceptionInInitializerError(e);
		}
	}

	/* Frames of each block that a thread has allocated, by the block's address. */
	static final ThreadLocal<Map<Long, List<String>>> NOTES = ThreadLocal.withInitial(HashMap::new);

	/* The allocation and the stack walk are on one line, so that their line numbers agree. */
	static void take() {
		NOTES.get().put(UNSAFE.allocateMemory(BYTES), frames());
	}

	/* Returns the caller's frame, and the frames that it was called from. */
	static List<String> frames() {
		return WALKER.walk(all -> all.skip(1).map(Frames::text).toList());
	}

	/* Formats a frame: Frames.take (Frames.java:47) */
	static String text(StackWalker.StackFrame frame) {
		String method = frame.getClassName() + "." + frame.getMethodName();
		int line = frame.getLineNumber();
		return line > 0 ? method + " (" + frame.getFileName() + ":" + line + ")" : method;
	}

	interface Step {
		void run(int depth, int kind) throws Throwable;
	}

	static class Plain implements Step {
		Step next;

		public void run(int depth, int kind) throws Throwable {
			if (depth == 0)
				leaf(kind);
			else
				next.run(depth - 1, kind);
		}
	}

	static class Locked implements Step {
		Step next;

		public void run(int depth, int kind) throws Throwable {
			if (depth == 0)
				leaf(kind);
			else
				locked(depth, kind, 1, 2L, 3.0, "four", 5, 6, 7, 8L, 9.0f);
		}

		/* More arguments than there are registers for. */
		synchronized void locked(int depth, int kind, int a, long b, double c, String d, int e,
					 int f, int g, long h, float i) throws Throwable {
			next.run(depth - 1, kind);
		}
	}

	static class Caught implements Step {
		Step next;
		int times;

		public void run(int depth, int kind) throws Throwable {
			if (depth == 0) {
				leaf(kind);
				return;
			}
			try {
				next.run(depth - 1, kind);
				throw new IllegalStateException();
			} catch (IllegalStateException e) {
				times++;
			} finally {
				times++;
			}
		}
	}

	static void leaf(int kind) throws Throwable {
		switch (kind) {
		case 0 -> take();
		case 1 -> Frames.class.getDeclaredMethod("take").invoke(null);
		case 2 -> HANDLE.invokeExact();
		case 3 -> ((Runnable) Frames::take).run();
		case 4 -> AccessController.doPrivileged((PrivilegedAction<Void>) () -> {
			take();
			return null;
		});
		case 5 -> {
			List<Integer> list = new ArrayList<>(List.of(2, 1));
			list.sort((one, other) -> {
				take();
				return one - other;
			});
		}
		default -> IntStream.range(0, 1).forEach(i -> take());
		}
	}

	static void work(Step step, int count) {
		try {
			for (int i = 0; i < count; i++)
				step.run(i % 13, i % 7);
		} catch (Throwable e) {
			throw new RuntimeException(e);
		}
	}

	/* Two functions with large frames that call each other: neither is its own caller. */
	static long even(int depth, long a, long b) {
		long c = a * 3, d = b * 5, e = c ^ d, f = c + a, g = d - b, h = e * f, i = f * g, j = g * h;
		long below = depth == 0 ? a : odd(depth - 1, h, i);
		return below + a + b + c * d + e * f + g * h + i * j;
	}

	static long odd(int depth, long a, long b) {
		long c = a * 7, d = b * 9, e = c ^ d, f = c + a, g = d - b, h = e * f;
		return even(depth - 1, a + f, b + h) + a + b + c * d + e * f + g * h;
	}

	static long touch(int pages) {
		byte[] page = new byte[4096];
		long memory = UNSAFE.allocateMemory(2L * pages * page.length), sum = 0;
		for (long i = 0; i < pages; i++) {
			UNSAFE.putByte(memory + i * page.length, (byte) 1);
			UNSAFE.copyMemory(page, sun.misc.Unsafe.ARRAY_BYTE_BASE_OFFSET, null,
					  memory + (pages + i) * page.length, page.length);
		}
		for (int i = 0; i < pages; i += 100)
			sum += new byte[100 * page.length].length;
		return sum;
	}

	static void fault(int pages) throws InterruptedException {
		long[] sums = new long[2];
		for (int i = 0; i < pages / 50; i++) {
			Thread thread = new Thread(() -> sums[0] += even(80, 1, 2));
			thread.start();
			thread.join();
		}
		Thread thread = new Thread(() -> sums[1] += touch(pages));
		thread.start();
		thread.join();
	}

	public static void main(String[] arguments) throws Exception {
		int count = Integer.parseInt(arguments[1]);
		Plain plain = new Plain();
		Locked locked = new Locked();
		Caught caught = new Caught();
		plain.next = locked;
		locked.next = caught;
		caught.next = plain;
		System.out.println("ready " + ProcessHandle.current().pid());
		System.in.read();

		List<Thread> threads = new ArrayList<>();
		List<Map<Long, List<String>>> notes = new ArrayList<>();
		for (Step step : List.of(plain, locked, caught)) {
			Thread thread = new Thread(() -> {
				work(step, count);
				synchronized (notes) {
					notes.add(NOTES.get());
				}
			});
			thread.start();
			threads.add(thread);
		}
		for (Thread thread : threads)
			thread.join();
		try (PrintWriter file = new PrintWriter(arguments[0])) {
			for (Map<Long, List<String>> noted : notes)
				noted.forEach((at, frames) -> file.println(at + "\t" + String.join("\t", frames)));
		}
		if (arguments.length > 2)
			fault(Integer.parseInt(arguments[2]));
		System.out.println("done");
		System.in.read();
		System.in.read();
	}
}
