// A JVM, with a list of arrays that grows every 10 ms, after the first line and until there is another.
//
// The protocol is that of workload.h.
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

class Growing {
    public static void main(String[] args) throws IOException, InterruptedException {
        List<byte[]> kept = new ArrayList<>();

        System.out.println("ready " + ProcessHandle.current().pid());
        System.in.read();
        while (System.in.available() == 0) {
            for (int i = 0; i < 67; i++)
                kept.add(new byte[2000]);
            Thread.sleep(10);
        }
        System.in.read();
        System.out.println("done arrays=" + kept.size());
        System.in.read();
    }
}
