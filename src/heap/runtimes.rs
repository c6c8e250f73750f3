//! Runtimes that manage a heap of their own, whose objects no walk here finds: V8, the JVM and Go.

use crate::heap::area::Area;

/// Runtime with a heap of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    /// V8, of Node.js, Chromium and others.
    V8,
    /// The Java virtual machine.
    Jvm,
    /// Go.
    Go,
}

/// Address at which the first arena of Go's heap is mapped, on 64-bit machines.
const GO_HEAP: u64 = 0xc0_0000_0000;

impl Runtime {
    /// Finds the runtime of a process by what it has mapped.
    pub fn find(areas: &[Area]) -> Option<Self> {
        let of = |area: &Area| {
            let name = area.name();
            if name.starts_with(b"[anon: Go")
                || area.mapping.range.start == GO_HEAP && area.is_private_anonymous()
            {
                return Some(Self::Go);
            }
            if name.starts_with(b"[anon:v8") {
                return Some(Self::V8);
            }
            let file = name
                .rsplit(|&byte| byte == b'/')
                .next()
                .filter(|_| area.has_file())?;
            let is_v8 = matches!(
                file,
                b"node" | b"nodejs" | b"deno" | b"electron" | b"chrome" | b"chromium" | b"d8"
            ) || file.starts_with(b"libnode.so")
                || file.starts_with(b"libv8.");
            match file {
                b"libjvm.so" => Some(Self::Jvm),
                _ if is_v8 && area.mapping.executable => Some(Self::V8),
                _ => None,
            }
        };
        areas.iter().find_map(of)
    }

    /// Returns the name of the heap.
    pub fn heap(self) -> &'static str {
        match self {
            Self::V8 => "V8's heap (JavaScript)",
            Self::Jvm => "the JVM's heap (Java)",
            Self::Go => "Go's heap",
        }
    }

    /// Returns the tool that shows the objects of the heap.
    pub fn tool(self, pid: u32) -> String {
        match self {
            Self::V8 => "heap snapshots of node --inspect".into(),
            Self::Jvm => format!("jcmd {pid} GC.class_histogram"),
            Self::Go => "go tool pprof http://HOST:PORT/debug/pprof/heap".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_known_by_what_is_mapped() {
        for (line, expected) in [
            (
                "1000-2000 r-xp 00000000 fe:00 7 /usr/bin/node",
                Some(Runtime::V8),
            ),
            ("1000-2000 r--p 00000000 fe:00 7 /home/node", None),
            (
                "1000-2000 r-xp 00000000 fe:00 7 /usr/lib/libnode.so.108",
                Some(Runtime::V8),
            ),
            (
                "1000-2000 r-xp 00000000 fe:00 7 /opt/jdk/lib/server/libjvm.so",
                Some(Runtime::Jvm),
            ),
            (
                "c000000000-c000400000 rw-p 00000000 00:00 0 ",
                Some(Runtime::Go),
            ),
            (
                "1000-2000 rw-p 00000000 00:00 0 [anon: Go: heap]",
                Some(Runtime::Go),
            ),
            (
                "1000-2000 r-xp 00000000 fe:00 7 /usr/bin/redis-server",
                None,
            ),
        ] {
            assert_eq!(
                Runtime::find(&Area::parse_list(line.as_bytes())),
                expected,
                "{line}"
            );
        }
        assert!(
            Runtime::Jvm.tool(7).starts_with("jcmd 7 ") && Runtime::Go.heap().starts_with("Go")
        );
    }
}
