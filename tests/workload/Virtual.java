// SPDX-License-Identifier: BSD-2-Clause
import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/*
 * java Virtual FILE COUNT: three virtual threads allocate COUNT blocks each, and record the frames of each block, as
 * Frames does. The first thread runs without a break. The second one yields in the innermost function, and allocates
 * when it goes on. The third one yields there, too, and allocates a few callers later. A thread that has yielded has
 * its frames in Java's heap, and gets back few at a time.
 */
public class Virtual {
	static final int DEPTH = 150, LATER = 140;

	interface Step {
		void at(int depth);
	}

	static int descend(int depth, Step step) {
		step.at(depth);
		int below = depth == 0 ? 0 : descend(depth - 1, step);
		if (depth == LATER)
			step.at(-1);
		return below + 1;
	}

	static void straight(int depth) {
		if (depth == 0)
			Frames.take();
	}

	static void giveWay(int depth) {
		if (depth == 0) {
			Thread.yield();
			Frames.take();
		}
	}

	static void giveWayAndReturn(int depth) {
		if (depth == 0)
			Thread.yield();
		if (depth == -1)
			Frames.take();
	}

	public static void main(String[] arguments) throws Exception {
		int count = Integer.parseInt(arguments[1]);
		System.out.println("ready " + ProcessHandle.current().pid());
		System.in.read();

		List<Map<Long, List<String>>> notes = new ArrayList<>();
		for (Step step : List.<Step>of(Virtual::straight, Virtual::giveWay, Virtual::giveWayAndReturn)) {
			Runnable body = () -> {
				for (int i = 0; i < count; i++)
					descend(DEPTH, step);
				synchronized (notes) {
					notes.add(Frames.NOTES.get());
				}
			};
			/* The method is found by name, because a compiler of JDK 17 does not
			 * know it. */
			Object thread = Thread.class.getMethod("startVirtualThread", Runnable.class).invoke(null, body);
			((Thread) thread).join();
		}
		try (PrintWriter file = new PrintWriter(arguments[0])) {
			for (Map<Long, List<String>> noted : notes)
				noted.forEach((at, frames) -> file.println(at + "\t" + String.join("\t", frames)));
		}
		System.out.println("done");
		System.in.read();
		System.in.read();
	}
}
